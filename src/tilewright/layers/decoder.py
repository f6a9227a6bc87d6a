"""A decoder-only language model: token ids in, logits out. Every text family here is a config of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.layers.attention import Attention, AttentionConfig
from tilewright.layers.batch import Batch
from tilewright.layers.cross_attention import CrossLayer
from tilewright.layers.mlp import GatedMlp
from tilewright.layers.moe import MoeConfig, SparseMlp
from tilewright.layers.rope import Rope, RopeConfig
from tilewright.ops.embedding import embedding, scatter_add_rows, scatter_rows
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.linear import PackedWeight, linear
from tilewright.ops.norm import rms_norm
from tilewright.ops.plan import scope
from tilewright.weights.spec import Linear, Plain, Weight


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    attention: AttentionConfig
    rope: RopeConfig
    eps: float
    activation: str
    mlp_bias: bool
    tied: bool  # the head is the embedding table
    max_context: int
    moe: MoeConfig | None = None
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0 for none; empty: none has one
    cross_layers: tuple[int, ...] = ()  # those that attend to encoder states
    num_extra_embeddings: int = 0  # rows of the embedding table beyond the head's: tokens that are read, never written

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values of tokens."""
        return self.num_layers - len(self.cross_layers)

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size + self.num_extra_embeddings

    def attention_of(self, layer: int) -> AttentionConfig:
        return replace(self.attention, window=self.windows[layer]) if self.windows else self.attention


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). `kv_layer` is which of the caches is its own."""

    def __init__(self, name: str, config: DecoderConfig, layer: int, kv_layer: int) -> None:
        self.eps = config.eps
        self.attention_norm = Plain(f"{name}.input_layernorm.weight", config.width)
        self.attention = Attention(f"{name}.self_attn", config.attention_of(layer), kv_layer)
        self.mlp_norm = Plain(f"{name}.post_attention_layernorm.weight", config.width)
        self.mlp: GatedMlp | SparseMlp
        if config.moe is not None and config.moe.is_sparse(layer):
            self.mlp = SparseMlp(f"{name}.mlp", config.width, config.moe)
        else:
            activation, bias = config.activation, config.mlp_bias
            self.mlp = GatedMlp(f"{name}.mlp", config.width, config.mlp_width, activation=activation, bias=bias)

    def __call__(self, x_TD: Tensor, batch: Batch, cos: Tensor, sin: Tensor, rows: Tensor | None = None) -> Tensor:
        """x, updated in place; with `rows`, only those of its tokens, though the keys and values of all are stored."""
        attended = self.attention(rms_norm(x_TD, self.attention_norm.value, self.eps), batch, cos, sin)
        if rows is not None:
            x_TD, attended = x_TD[rows], attended[rows]
        linear(attended, self.attention.output.value, residual=x_TD, out=x_TD)
        self.mlp(x_TD, rms_norm(x_TD, self.mlp_norm.value, self.eps))
        return x_TD


def _layer(name: str, config: DecoderConfig, layer: int) -> DecoderLayer | CrossLayer:
    num_cross_before = sum(other < layer for other in config.cross_layers)
    if layer not in config.cross_layers:
        return DecoderLayer(name, config, layer, layer - num_cross_before)
    return CrossLayer(
        name,
        config.attention,
        num_cross_before,
        mlp_width=config.mlp_width,
        activation=config.activation,
        mlp_bias=config.mlp_bias,
    )


class Decoder:
    """Embedding, layers, final norm and head. `name` is the prefix of its tensors in the checkpoint."""

    def __init__(self, name: str, config: DecoderConfig) -> None:
        self.config = config
        self.embed_tokens: Weight[PackedWeight] | Weight[Tensor]
        if config.tied:  # kept once, as the head wants it
            self.head = Linear([(f"{name}.embed_tokens", config.vocab_size)], config.width)
            self.embed_tokens = self.head
        else:
            self.embed_tokens = Plain(f"{name}.embed_tokens.weight", config.num_embeddings, config.width)
            self.head = Linear([("lm_head", config.vocab_size)], config.width)
        self.layers = [_layer(f"{name}.layers.{i}", config, i) for i in range(config.num_layers)]
        self.norm = Plain(f"{name}.norm.weight", config.width)
        self.rope = Rope(config.rope)

    def store_states(self, states_ND: Tensor, slots_N: Tensor, kv_caches: Sequence[KvCache]) -> None:
        """Writes the keys and values of encoder states, for each cross-attention layer into its cache."""
        for layer in self.layers:
            if isinstance(layer, CrossLayer):
                with scope():
                    layer.attention.store(states_ND, kv_caches[layer.attention.layer], slots_N)

    def checkpoint_name(self, name: str) -> str | None:
        """`name`, or None for what some tools store though it follows from the rest: rotary tables and a tied head."""
        redundant = name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")
        return None if redundant else name

    def __call__(self, batch: Batch) -> Tensor:
        """fp32 logits [R, V] of the rows the batch asks for."""
        x_TD = embedding(batch.token_ids_T, self.embed_tokens.value)
        for run in batch.media:
            scatter_rows(x_TD, run.rows_M, run.embeddings_MD)
        cos, sin = self.rope.tables(batch.positions_AT)
        for i, layer in enumerate(self.layers[:-1]):
            with scope():
                layer(x_TD, batch, cos, sin)
                for run in batch.media:
                    if i < len(run.deepstack):
                        scatter_add_rows(x_TD, run.rows_M, run.deepstack[i])
        with scope():
            x_TD = self.layers[-1](x_TD, batch, cos, sin, batch.logit_rows)
        return self.logits(x_TD)

    def logits(self, x_TD: Tensor) -> Tensor:
        return linear(rms_norm(x_TD, self.norm.value, self.config.eps), self.head.value, out_dtype=torch.float32)
