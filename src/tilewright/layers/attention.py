"""Self-attention, and cross-attention layers that attend to encoder states (Llama-3.2-Vision).

Self-attention is one product for q, k and v, norm and rope in place, then attention over the batch's KV pages, or over
the batch itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import Batch, CrossBatch, SequenceBatch
from tilewright.layers.cost import Cost, linear_cost
from tilewright.layers.linear import Linear
from tilewright.layers.mlp import GatedMlp, MlpConfig
from tilewright.layers.norm import NormConfig, RmsNorm
from tilewright.layers.rope import RopeConfig, RopeTables
from tilewright.ops.activation import sigmoid_gate
from tilewright.ops.attention import KvCache, kv_store, paged_attention
from tilewright.ops.embedding import embedding, qk_norm_rope, rope_qk, scatter_rows
from tilewright.ops.norm import rms_norm
from tilewright.weights.conv import Unpacked
from tilewright.weights.spec import HeadShard


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Heads of a self- or cross-attention layer."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int

    @property
    def multiply_adds_per_pair(self) -> int:
        """Multiply-adds of one query and one key in this layer: the score, and the value's share of the result."""
        return 2 * self.num_heads * self.head_width


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(HeadsConfig):
    rope: RopeConfig
    qk_norm: NormConfig | None = None  # RMS norm of each head of q and k before rope
    qkv_bias: bool = False
    output_bias: bool = False
    window: int = 0  # tokens that a query sees at most, itself included; 0: all
    scale: float | None = None  # of scores; None: head_width ** -0.5
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: no cap
    output_gate: bool = False  # each head's query is followed by a gate, whose sigmoid multiplies the head's output


@dataclass(frozen=True)
class KvLayer:
    """Keys and values that one attention layer stores per token, on this rank."""

    num_heads: int
    head_width: int
    window: int = 0  # tokens that a query sees at most; 0: all of the sequence


def heads_of(config: HeadsConfig) -> HeadShard:
    """Return this rank's heads."""
    return partition.current().heads("attention", config.num_heads, config.num_kv_heads, config.head_width)


class Attention:
    """Self-attention: the concatenated outputs of the heads; `output` projects them back to the model's width.

    `row_scale` names a vector [width] that multiplies the result of `output`.
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


@dataclass(frozen=True, kw_only=True)
class CrossAttentionConfig(HeadsConfig):
    eps: float  # of the norms of q and k


class CrossAttention:
    """Attention to encoder states: the concatenated outputs of the heads.

    Queries and keys are RMS-normed, not rotated.
    """

    def __init__(self, name: str, config: CrossAttentionConfig, layer: int, gate: str) -> None:
        self.config, self.layer = config, layer
        heads = heads_of(config)
        self.num_kv_heads = heads.num_keys
        self.kv = KvLayer(heads.num_keys, config.head_width)
        query_width, kv_width = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        queries, keys = heads.queries.times(config.head_width), heads.keys.times(config.head_width)
        self.query = Linear([(f"{name}.q_proj", query_width, queries)], config.width)
        self.key_value = Linear([(f"{name}.{part}_proj", kv_width, keys) for part in "kv"], config.width)
        self.output = Linear([(f"{name}.o_proj", config.width)], query_width, column_shard=queries, tanh_scale=gate)
        self.q_norm = Unpacked(f"{name}.q_norm.weight", config.head_width)
        self.k_norm = Unpacked(f"{name}.k_norm.weight", config.head_width)

    def __call__(self, h_RD: Tensor, cross: CrossBatch) -> Tensor:
        config = self.config
        q_RHK = self.query(h_RD).view(h_RD.shape[0], -1, config.head_width)
        rms_norm(q_RHK, self.q_norm.value, config.eps, out=q_RHK)
        cache = cross.kv_caches[self.layer]
        attended = paged_attention(q_RHK, cache, cross.block_table, cross.query_starts, cross.lengths, causal=False)
        return attended.view(h_RD.shape[0], -1)

    def store(self, states_ND: Tensor, cache: KvCache, slots_N: Tensor) -> None:
        """Write the keys and values of encoder states [N, D] to their slots."""
        config = self.config
        key_value = self.key_value(states_ND).view(len(states_ND), -1, config.head_width)
        k_NGK, v_NGK = key_value.split(self.num_kv_heads, dim=1)
        rms_norm(k_NGK, self.k_norm.value, config.eps, out=k_NGK)
        kv_store(k_NGK, v_NGK, cache, slots_N)


class CrossLayer:
    """x + tanh(gate) attention(norm(x)), then x + tanh(gate) mlp(norm(x)), for tokens that attend to encoder states.

    Other tokens are unchanged, bit for bit: Meta's own implementation masks both branches for them.
    """

    def __init__(self, name: str, config: CrossAttentionConfig, layer: int, mlp: MlpConfig, norm: NormConfig) -> None:
        """Make the layer; `layer` counts only cross-attention layers."""
        self.attention_norm = RmsNorm(f"{name}.input_layernorm", config.width, norm.eps, plus_one=norm.plus_one)
        self.attention = CrossAttention(f"{name}.cross_attn", config, layer, f"{name}.cross_attn_attn_gate")
        self.mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", config.width, norm.eps, plus_one=norm.plus_one)
        self.mlp = GatedMlp(
            f"{name}.mlp",
            config.width,
            mlp.width,
            activation=mlp.activation,
            bias=mlp.bias,
            tanh_scale=f"{name}.cross_attn_mlp_gate",
        )

    def __call__(self, x_TD: Tensor, batch: Batch, rope: RopeTables, rows: Tensor | None = None) -> Tensor:
        """Update x in place and return it; with `rows`, return only those rows."""
        if batch.cross is not None:
            rows_R = batch.cross.rows_R
            x_RD = x_TD if rows_R is None else embedding(rows_R, x_TD)
            self._update(x_RD, batch.cross)
            if rows_R is not None:
                scatter_rows(x_TD, rows_R, x_RD)
        return x_TD if rows is None else x_TD[rows]

    def cost(self) -> Cost:
        """Return the cost of a token that sees encoder states, whose keys and values `store` computes once."""
        return linear_cost(self.attention.query, self.attention.output, self.mlp)

    def _update(self, x_RD: Tensor, cross: CrossBatch) -> None:
        attended = self.attention(self.attention_norm(x_RD), cross)
        self.mlp(x_RD, self.attention.output.add_and_norm(attended, x_RD, self.mlp_norm))
