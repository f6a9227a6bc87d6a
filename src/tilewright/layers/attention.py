"""Self-attention: one product for q, k and v, norm and rope in place, then over what the batch has: pages or itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import SequenceBatch
from tilewright.layers.linear import Linear
from tilewright.layers.rms_norm import NormConfig
from tilewright.layers.rope import RopeConfig, RopeTables
from tilewright.ops.activation import sigmoid_gate
from tilewright.ops.rope import qk_norm_rope, rope_qk
from tilewright.weights.shard import HeadShard
from tilewright.weights.unpacked import Unpacked


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The heads of an attention layer, of itself or of encoder states."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int

    @property
    def multiply_adds_per_pair(self) -> int:
        """Of one query and one key in this layer: their product, and the value's share of the result."""
        return 2 * self.num_heads * self.head_width


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(HeadsConfig):
    rope: RopeConfig
    qk_norm: NormConfig | None = None  # RMS norm of each head of q and k before rope
    qkv_bias: bool = False
    output_bias: bool = False
    window: int = 0  # tokens that a query sees at most, its own among them; 0: all
    scale: float | None = None  # of scores; None: head_width ** -0.5
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    output_gate: bool = False  # a head's query has a gate behind it, whose sigmoid multiplies what the head attends to


@dataclass(frozen=True)
class KvLayer:
    """The keys and values that one attention layer keeps of a token, on this rank."""

    num_heads: int
    head_width: int
    window: int = 0  # tokens that a query sees at most; 0: all, for as long as the sequence runs


def heads_of(config: HeadsConfig) -> HeadShard:
    """This rank's."""
    return partition.current().heads("attention", config.num_heads, config.num_kv_heads, config.head_width)


class Attention:
    """What each token's heads attend to, side by side; `output` projects it back to the model's width.

    `row_scale` names a vector [width] that multiplies what `output` gives.
    """

    def __init__(self, name: str, config: AttentionConfig, layer: int, *, row_scale: str | None = None) -> None:
        self.config, self.layer = config, layer
        heads = heads_of(config)
        self.num_kv_heads = heads.num_keys
        self.kv = KvLayer(heads.num_keys, config.head_width, config.window)
        query_width, kv_width = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        queries, keys = heads.queries.times(config.head_width), heads.keys.times(config.head_width)
        gated = 2 if config.output_gate else 1
        self.qkv = Linear(
            [
                (f"{name}.q_proj", gated * query_width, heads.queries.times(gated * config.head_width)),
                (f"{name}.k_proj", kv_width, keys),
                (f"{name}.v_proj", kv_width, keys),
            ],
            config.width,
            bias=config.qkv_bias,
        )
        self.output = Linear(
            [(f"{name}.o_proj", config.width)],
            query_width,
            column_shard=queries,
            bias=config.output_bias,
            row_scale=row_scale,
        )
        if config.qk_norm is not None:
            self.q_norm = Unpacked(f"{name}.q_norm.weight", config.head_width)
            self.k_norm = Unpacked(f"{name}.k_norm.weight", config.head_width)

    def __call__(self, h_TD: Tensor, batch: SequenceBatch, rope: RopeTables) -> Tensor:
        config, num_kv_heads = self.config, self.num_kv_heads
        qkv = self.qkv(h_TD).view(h_TD.shape[0], -1, config.head_width)
        q_THK, k_TGK, v_TGK = qkv.tensor_split([-2 * num_kv_heads, -num_kv_heads], dim=1)
        gate_THK = None
        if config.output_gate:  # q of the first head, its gate, q of the second, ...
            q_THK, gate_THK = q_THK[:, ::2], q_THK[:, 1::2]
        norm = config.qk_norm
        if norm is not None:
            weights = self.q_norm.value, self.k_norm.value
            qk_norm_rope(q_THK, k_TGK, *weights, norm.eps, *rope, weight_plus_one=norm.plus_one)
        else:
            rope_qk(q_THK, k_TGK, *rope)
        attended = batch.attend(
            self.layer, q_THK, k_TGK, v_TGK, window=config.window, scale=config.scale, soft_cap=config.soft_cap
        )
        if gate_THK is not None:
            sigmoid_gate(attended, gate_THK, out=attended)
        return attended.view(h_TD.shape[0], -1)
