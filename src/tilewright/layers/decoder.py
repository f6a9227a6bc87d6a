"""A decoder-only language model: token ids in, logits out. Every text family here is a config of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.layers import precision
from tilewright.layers.attention import Attention, AttentionConfig, heads_of
from tilewright.layers.batch import Batch, MediaRun, SequenceBatch
from tilewright.layers.cost import Cost, DecoderCost, linear_cost
from tilewright.layers.cross_attention import CrossLayer
from tilewright.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet
from tilewright.layers.linear import GatheredLinear
from tilewright.layers.mlp import GatedMlp
from tilewright.layers.moe import MoeConfig, SparseMlp
from tilewright.layers.rms_norm import RmsNorm
from tilewright.layers.rope import Rope, RopeConfig
from tilewright.layers.token_embedding import TokenEmbedding
from tilewright.ops.embedding import embedding, scatter_add_rows, scatter_rows
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.plan import empty, scope

LEAST_LAYERS_WITH_ENDS = 8  # of a decoder whose first and last layer are rounded less


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
    norm_plus_one: bool = False  # norms of the hidden state scale by 1 + weight
    delta: GatedDeltaConfig | None = None
    delta_layers: tuple[int, ...] = ()  # those that have a state per sequence instead of keys and values
    layer_scale: bool = False  # what attention and a dense MLP add is multiplied by a vector of each layer

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values of tokens."""
        return self.num_layers - len(self.cross_layers) - len(self.delta_layers)

    @property
    def multiply_adds_per_pair(self) -> int:
        """Of one query and one key in one layer: their product, and the value's share of the result."""
        return 2 * self.attention.num_heads * self.attention.head_width

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size + self.num_extra_embeddings

    def attention_of(self, layer: int) -> AttentionConfig:
        return replace(self.attention, window=self.windows[layer]) if self.windows else self.attention


def hidden_norm(name: str, config: DecoderConfig) -> RmsNorm:
    """A norm of the hidden state."""
    return RmsNorm(name, config.width, config.eps, plus_one=config.norm_plus_one)


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); attention over keys and values, or over a recurrent state.

    `own` is which of the caches, or of the states, are its own.
    """

    def __init__(self, name: str, config: DecoderConfig, layer: int, own: int) -> None:
        self.attention_norm = hidden_norm(f"{name}.input_layernorm", config)
        self.attention: Attention | GatedDeltaNet
        if config.delta is not None and layer in config.delta_layers:
            self.attention = GatedDeltaNet(f"{name}.linear_attn", config.delta, own)
        else:
            scale = f"{name}.self_attn_layer_scale.scale" if config.layer_scale else None
            with precision.use(precision.current().with_care):
                self.attention = Attention(f"{name}.self_attn", config.attention_of(layer), own, row_scale=scale)
        self.mlp_norm = hidden_norm(f"{name}.post_attention_layernorm", config)
        self.mlp: GatedMlp | SparseMlp
        if config.moe is not None and config.moe.is_sparse(layer):
            self.mlp = SparseMlp(f"{name}.mlp", config.width, config.moe)
        else:
            self.mlp = GatedMlp(
                f"{name}.mlp",
                config.width,
                config.mlp_width,
                activation=config.activation,
                bias=config.mlp_bias,
                row_scale=f"{name}.mlp_layer_scale.scale" if config.layer_scale else None,
            )

    def __call__(
        self, x_TD: Tensor, batch: SequenceBatch, cos: Tensor, sin: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """x, updated in place; with `rows`, only those of its tokens, though all leave keys and values, or a state."""
        attended = self.attention(self.attention_norm(x_TD), batch, cos, sin)
        if rows is not None:
            x_TD, attended = embedding(rows, x_TD), embedding(rows, attended)
        self.mlp(x_TD, self.attention.output.add_and_norm(attended, x_TD, self.mlp_norm))
        return x_TD

    def cost(self) -> Cost:
        return linear_cost(self.attention) + self.mlp.cost()


def _layers(name: str, config: DecoderConfig) -> list[DecoderLayer | CrossLayer]:
    """The first and the last with care; of a few layers that would be most of them."""
    formats, last = precision.current(), config.num_layers - 1
    made = []
    for layer in range(config.num_layers):
        is_end = layer in (0, last) and config.num_layers >= LEAST_LAYERS_WITH_ENDS
        with precision.use(formats.with_care if is_end else formats):
            made.append(_layer(f"{name}.{layer}", config, layer))
    return made


def _layer(name: str, config: DecoderConfig, layer: int) -> DecoderLayer | CrossLayer:
    kinds = [_kind(config, other) for other in range(layer + 1)]
    own = kinds[:layer].count(kinds[layer])  # how many of its kind come before it
    if kinds[layer] != "cross":
        return DecoderLayer(name, config, layer, own)
    return CrossLayer(
        name,
        config.attention,
        own,
        mlp_width=config.mlp_width,
        activation=config.activation,
        mlp_bias=config.mlp_bias,
    )


def _kind(config: DecoderConfig, layer: int) -> str:
    if layer in config.cross_layers:
        return "cross"
    return "delta" if layer in config.delta_layers else "attention"


class Decoder:
    """Embedding, layers, final norm and head. `name` is the prefix of its tensors in the checkpoint."""

    def __init__(self, name: str, config: DecoderConfig) -> None:
        self.config = config
        table = f"{name}.embed_tokens"
        head_name = table if config.tied else "lm_head"
        self.head = GatheredLinear.named(head_name, config.vocab_size, config.width, what="vocabulary", is_head=True)
        self.embed_tokens = TokenEmbedding(
            table, config.num_embeddings, config.width, self.head if config.tied else None
        )
        self.layers = _layers(f"{name}.layers", config)
        self.norm = hidden_norm(f"{name}.norm", config)
        self.rope = Rope(config.rope)
        self.num_kv_heads = heads_of(config.attention).num_keys

    def store_states(self, states_ND: Tensor, slots_N: Tensor, kv_caches: Sequence[KvCache]) -> None:
        """Writes the keys and values of encoder states, for each cross-attention layer into its cache."""
        for layer in self.layers:
            if isinstance(layer, CrossLayer):
                with scope():
                    layer.attention.store(states_ND, kv_caches[layer.attention.layer], slots_N)

    def cost(self) -> DecoderCost:
        own = (layer.cost() for layer in self.layers if not isinstance(layer, CrossLayer))
        cross = (layer.cost() for layer in self.layers if isinstance(layer, CrossLayer))
        per_pair = self.config.multiply_adds_per_pair
        return DecoderCost(
            layers=sum(own, Cost()),
            cross_layers=sum(cross, Cost()),
            head=linear_cost(self.head),
            multiply_adds_per_pair=self.config.num_kv_layers * per_pair,
            cross_multiply_adds_per_pair=len(self.config.cross_layers) * per_pair,
        )

    def checkpoint_name(self, name: str) -> str | None:
        """`name`, or None for what some tools store though it follows from the rest: rotary tables and a tied head."""
        redundant = name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")
        return None if redundant else name

    def __call__(self, batch: Batch) -> Tensor:
        """fp32 logits [R, V] of the rows the batch asks for."""
        return self.logits(self.hidden(batch, batch.logit_rows))

    def embed(self, token_ids_T: Tensor, media: Sequence[MediaRun]) -> Tensor:
        """What the first layer reads [T, D]: rows of the table, features in the place of those that are media."""
        x_TD = self.embed_tokens(token_ids_T)
        for run in media:
            scatter_rows(x_TD, run.rows_M, run.embeddings_MD)
        return x_TD

    def hidden(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """What the head reads, the normed result of the last layer: of the given rows [R, D], or of all [T, D]."""
        x_TD = self.embed(batch.token_ids_T, batch.media)
        cos, sin = self.rope.tables(batch.positions_AT)
        for i, layer in enumerate(self.layers[:-1]):
            with scope():
                layer(x_TD, batch, cos, sin)
                for run in batch.media:
                    if i < len(run.deepstack):
                        scatter_add_rows(x_TD, run.rows_M, run.deepstack[i])
            if batch.kept is not None and batch.kept.num_layers == i + 1:
                batch.kept.states_MD = x_TD[batch.kept.rows_M]
        out = empty((len(x_TD if rows is None else rows), self.config.width), x_TD.dtype)
        with scope():
            self.norm(self.layers[-1](x_TD, batch, cos, sin, rows), out=out)
        return out

    def logits(self, h_TD: Tensor) -> Tensor:
        """fp32 [T, V] of what `hidden` gives."""
        return self.head(h_TD, out_dtype=torch.float32)
