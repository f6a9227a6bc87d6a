"""Self-attention: one product for q, k and v, norm and rope in place, then over what the batch has: pages or itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import SequenceBatch
from tilewright.layers.linear import Linear
from tilewright.ops.activation import sigmoid_gate
from tilewright.ops.rope import qk_norm_rope, rope_qk
from tilewright.weights.shard import HeadShard
from tilewright.weights.unpacked import Unpacked


@dataclass(frozen=True)
class AttentionConfig:
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    eps: float
    qk_norm: bool  # RMS norm of each head of q and k before rope
    qkv_bias: bool
    output_bias: bool
    window: int = 0  # 0: all keys
    norm_plus_one: bool = False  # the norms of q and k scale by 1 + weight
    output_gate: bool = False  # a head's query has a gate behind it, whose sigmoid multiplies what the head attends to


def heads_of(config: AttentionConfig) -> HeadShard:
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
        if config.qk_norm:
            self.q_norm = Unpacked(f"{name}.q_norm.weight", config.head_width)
            self.k_norm = Unpacked(f"{name}.k_norm.weight", config.head_width)

    def __call__(self, h_TD: Tensor, batch: SequenceBatch, cos: Tensor, sin: Tensor) -> Tensor:
        config, num_kv_heads = self.config, self.num_kv_heads
        qkv = self.qkv(h_TD).view(h_TD.shape[0], -1, config.head_width)
        q_THK, k_TGK, v_TGK = qkv.tensor_split([-2 * num_kv_heads, -num_kv_heads], dim=1)
        gate_THK = None
        if config.output_gate:  # q of the first head, its gate, q of the second, ...
            q_THK, gate_THK = q_THK[:, ::2], q_THK[:, 1::2]
        if config.qk_norm:
            weights = self.q_norm.value, self.k_norm.value
            qk_norm_rope(q_THK, k_TGK, *weights, config.eps, cos, sin, weight_plus_one=config.norm_plus_one)
        else:
            rope_qk(q_THK, k_TGK, cos, sin)
        attended = batch.attend(self.layer, q_THK, k_TGK, v_TGK, window=config.window)
        if gate_THK is not None:
            sigmoid_gate(attended, gate_THK, out=attended)
        return attended.view(h_TD.shape[0], -1)
