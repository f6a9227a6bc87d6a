"""A decoder-only language model: token ids in, logits out.

Every text family is a config of it, in which each layer has its own spec (`LayerSpec`): a family that needs something
new adds an option to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import precision
from tilewright.layers.attention import (
    Attention,
    AttentionConfig,
    CrossAttentionConfig,
    CrossLayer,
    HeadsConfig,
    KvLayer,
)
from tilewright.layers.batch import Batch, FeatureRun, SequenceBatch, WantedStates
from tilewright.layers.cost import Cost, DecoderCost, linear_cost
from tilewright.layers.embedding import TokenEmbedding
from tilewright.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet
from tilewright.layers.linear import GatheredLinear
from tilewright.layers.mlp import GatedMlp, MlpConfig, MoeConfig, SparseMlp
from tilewright.layers.norm import NormConfig, RmsNorm
from tilewright.layers.rope import LayerRopes, RopeTables
from tilewright.ops.attention import KvCache
from tilewright.ops.embedding import embedding, scatter_add_rows, scatter_rows
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig

LEAST_LAYERS_WITH_ENDS = 8  # a shorter decoder does not keep its first and last layer more precise


@dataclass(frozen=True)
class LayerSpec:
    """Spec of one layer: x + attention(norm(x)), then x + mlp(norm(x)).

    The type of `attention` decides the kind of the layer: self-attention, cross-attention to encoder states, or a
    recurrent state instead of keys and values.
    """

    attention: AttentionConfig | CrossAttentionConfig | GatedDeltaConfig
    mlp: MlpConfig | MoeConfig
    norm: NormConfig  # of the hidden state, before both
    scales_rows: bool = False  # the outputs of attention and of a dense MLP are multiplied by vectors of the checkpoint


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: NormConfig  # of the last layer's result
    tied: bool  # the head is the embedding table
    max_context: int
    num_extra_embeddings: int = 0  # embedding rows beyond the head's: tokens that are read, never generated

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size + self.num_extra_embeddings


def hidden_norm(name: str, width: int, config: NormConfig) -> RmsNorm:
    """Return a norm of the hidden state."""
    return RmsNorm(name, width, config.eps, plus_one=config.plus_one)


def ropes_of(layers: Sequence[LayerSpec]) -> LayerRopes:
    """Return the ropes of a decoder's layers."""
    configs = [spec.attention for spec in layers]
    return LayerRopes([config.rope if isinstance(config, AttentionConfig) else None for config in configs])


class DecoderLayer:
    """A layer with self-attention, or with a recurrent state.

    `own` is the index of its cache, or of its state.
    """

    def __init__(self, name: str, spec: LayerSpec, own: int) -> None:
        config, mlp = spec.attention, spec.mlp
        width = config.width
        self.attention_norm = hidden_norm(f"{name}.input_layernorm", width, spec.norm)
        self.attention: Attention | GatedDeltaNet
        if isinstance(config, GatedDeltaConfig):
            self.attention = GatedDeltaNet(f"{name}.linear_attn", config, own)
        elif isinstance(config, AttentionConfig):
            scale = f"{name}.self_attn_layer_scale.scale" if spec.scales_rows else None
            with precision.use(precision.current().for_sensitive):
                self.attention = Attention(f"{name}.self_attn", config, own, row_scale=scale)
        else:
            raise UnsupportedConfig(f"{name} attends to encoder states, expected it to attend to its own sequence")
        self.mlp_norm = hidden_norm(f"{name}.post_attention_layernorm", width, spec.norm)
        self.mlp: GatedMlp | SparseMlp
        if isinstance(mlp, MoeConfig):
            self.mlp = SparseMlp(f"{name}.mlp", width, mlp)
        else:
            self.mlp = GatedMlp(
                f"{name}.mlp",
                width,
                mlp.width,
                activation=mlp.activation,
                bias=mlp.bias,
                row_scale=f"{name}.mlp_layer_scale.scale" if spec.scales_rows else None,
            )

    def __call__(self, x_TD: Tensor, batch: SequenceBatch, rope: RopeTables, rows: Tensor | None = None) -> Tensor:
        """Update x in place and return it; with `rows`, only those rows, though all store keys and values or states."""
        attended = self.attention(self.attention_norm(x_TD), batch, rope)
        if rows is not None:
            x_TD, attended = embedding(rows, x_TD), embedding(rows, attended)
        self.mlp(x_TD, self.attention.output.add_and_norm(attended, x_TD, self.mlp_norm))
        return x_TD

    def cost(self) -> Cost:
        return linear_cost(self.attention) + self.mlp.cost()


def kv_layers_of(layers: Iterable[DecoderLayer | CrossLayer]) -> tuple[KvLayer, ...]:
    """Return what each self-attention layer stores per token, in the order of the caches."""
    return tuple(layer.attention.kv for layer in layers if isinstance(layer.attention, Attention))


def _layers(name: str, specs: Sequence[LayerSpec]) -> list[DecoderLayer | CrossLayer]:
    """Make the layers; the first and the last with higher precision, unless there are only a few."""
    formats, last = precision.current(), len(specs) - 1
    num_before: Counter[type] = Counter()  # layers of a kind, each with its own cache or state
    made: list[DecoderLayer | CrossLayer] = []
    for layer, spec in enumerate(specs):
        is_end = layer in (0, last) and len(specs) >= LEAST_LAYERS_WITH_ENDS
        kind = type(spec.attention)
        with precision.use(formats.for_sensitive if is_end else formats):
            made.append(_layer(f"{name}.{layer}", spec, num_before[kind]))
        num_before[kind] += 1
    return made


def _layer(name: str, spec: LayerSpec, own: int) -> DecoderLayer | CrossLayer:
    if not isinstance(spec.attention, CrossAttentionConfig):
        return DecoderLayer(name, spec, own)
    if not isinstance(spec.mlp, MlpConfig):
        raise UnsupportedConfig(f"{name} attends to encoder states and has experts, expected a dense MLP")
    return CrossLayer(name, spec.attention, own, spec.mlp, spec.norm)


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
        self.layers = _layers(f"{name}.layers", config.layers)
        self.norm = hidden_norm(f"{name}.norm", config.width, config.norm)
        self.ropes = ropes_of(config.layers)

    @property
    def kv_layers(self) -> tuple[KvLayer, ...]:
        """Keys and values that each self-attention layer stores per token, in the order of the caches."""
        return kv_layers_of(self.layers)

    @property
    def cross_layers(self) -> tuple[KvLayer, ...]:
        """Keys and values that each cross-attention layer stores per encoder state."""
        return tuple(layer.attention.kv for layer in self.layers if isinstance(layer, CrossLayer))

    def store_states(self, states_ND: Tensor, slots_N: Tensor, kv_caches: Sequence[KvCache]) -> None:
        """Write the keys and values of encoder states to each cross-attention layer's cache."""
        for layer in self.layers:
            if isinstance(layer, CrossLayer):
                with scope():
                    layer.attention.store(states_ND, kv_caches[layer.attention.layer], slots_N)

    def cost(self) -> DecoderCost:
        own = (layer.cost() for layer in self.layers if not isinstance(layer, CrossLayer))
        cross = (layer.cost() for layer in self.layers if isinstance(layer, CrossLayer))
        return DecoderCost(
            layers=sum(own, Cost()),
            cross_layers=sum(cross, Cost()),
            head=linear_cost(self.head),
            multiply_adds_per_pair=self._multiply_adds_per_pair(AttentionConfig),
            cross_multiply_adds_per_pair=self._multiply_adds_per_pair(CrossAttentionConfig),
        )

    def _multiply_adds_per_pair(self, kind: type[HeadsConfig]) -> int:
        configs = [spec.attention for spec in self.config.layers]
        return sum(config.multiply_adds_per_pair for config in configs if isinstance(config, kind))

    def checkpoint_name(self, name: str) -> str | None:
        """Return `name`, or None for redundant tensors that some tools store: rotary tables and a tied head."""
        redundant = name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")
        return None if redundant else name

    def __call__(self, batch: Batch) -> Tensor:
        """Return the fp32 logits [R, V] of the rows the batch asks for."""
        return self.logits(self.hidden(batch, batch.logit_rows))

    def with_states(self, batch: Batch, wanted: WantedStates) -> tuple[Tensor, Tensor]:
        """Return the same logits, and the hidden states that are wanted [M, D], in memory of their own."""
        x_TD, ropes = self._first(batch)
        self._run_layers(x_TD, batch, ropes, range(wanted.num_layers))
        states_MD = x_TD[wanted.rows_M]
        self._run_layers(x_TD, batch, ropes, range(wanted.num_layers, self.config.num_layers - 1))
        return self.logits(self._last(x_TD, batch, ropes, batch.logit_rows)), states_MD

    def embed(self, token_ids_T: Tensor, feature_runs: Sequence[FeatureRun]) -> Tensor:
        """Return the inputs of the first layer [T, D]: rows of the table, or features for media tokens."""
        x_TD = self.embed_tokens(token_ids_T)
        for run in feature_runs:
            scatter_rows(x_TD, run.rows_M, run.embeddings_MD)
        return x_TD

    def hidden(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Return the normed output of the last layer, which the head reads: of the given rows [R, D], or all [T, D]."""
        x_TD, ropes = self._first(batch)
        self._run_layers(x_TD, batch, ropes, range(self.config.num_layers - 1))
        return self._last(x_TD, batch, ropes, rows)

    def _first(self, batch: Batch) -> tuple[Tensor, Sequence[RopeTables]]:
        """Return the inputs of the first layer, and the rope tables of each layer."""
        return self.embed(batch.token_ids_T, batch.feature_runs), self.ropes.tables(batch.positions_AT)

    def _run_layers(self, x_TD: Tensor, batch: Batch, ropes: Sequence[RopeTables], layers: range) -> None:
        """Update x by some of the layers, all of them before the last one."""
        for i in layers:
            with scope():
                self.layers[i](x_TD, batch, ropes[i])
                for run in batch.feature_runs:
                    if i < len(run.deepstack):
                        scatter_add_rows(x_TD, run.rows_M, run.deepstack[i])

    def _last(self, x_TD: Tensor, batch: Batch, ropes: Sequence[RopeTables], rows: Tensor | None) -> Tensor:
        """Return the normed output of the last layer, of the given rows or of all."""
        out = empty((len(x_TD if rows is None else rows), self.config.width), x_TD.dtype)
        with scope():
            self.norm(self.layers[-1](x_TD, batch, ropes[-1], rows), out=out)
        return out

    def logits(self, h_TD: Tensor) -> Tensor:
        """Return the fp32 logits [T, V] of the output of `hidden`."""
        return self.head(h_TD, out_dtype=torch.float32)
