"""A decoder-only language model that reads a packed batch of prompts once: hidden states, no cache, no head.

Z-Image and FLUX.2 klein use Qwen3 this way, Qwen-Image the text model of Qwen2.5-VL. Layers after the last that is read
are neither built nor loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.batch import UncachedBatch, starts_of
from tilewright.layers.decoder import DecoderConfig, DecoderLayer, hidden_norm, ropes_of
from tilewright.layers.embedding import TokenEmbedding
from tilewright.models.text import QWEN3_HEAD_WIDTH
from tilewright.models.text_config import decoder_config, whole_name
from tilewright.ops import backend
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig


@dataclass(frozen=True)
class PackedPrompts:
    """Concatenated token ids of all prompts, T in all; prompt b starts at starts[b]."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, of each within its prompt
    starts: Tensor  # int32 [B + 1]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> PackedPrompts:
        lengths = tuple(map(len, token_ids))
        assert lengths, "no prompt to encode"
        assert min(lengths) > 0, "a prompt without tokens: tokenizers of text encoders add an end at least"
        device = backend.device()
        return cls(
            torch.tensor(list(itertools.chain(*token_ids)), dtype=torch.int64, device=device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            starts_of(lengths),
            lengths,
        )

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def split(self, x_TD: Tensor) -> list[Tensor]:
        """Return the rows of each prompt."""
        return list(x_TD.split(self.lengths))


MODEL_TYPES = ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3")


class DecoderEncoder:
    """Hidden states of prompts.

    `hidden_layers` are numbered as in transformers: 0 is the embedding, i the result of layer i, the last of which is
    normed; negative numbers count from the end.
    """

    def __init__(self, config: DecoderConfig, hidden_layers: Sequence[int] = (-1,)) -> None:
        self.config = config
        self.hidden_layers = tuple(_counted(layer, config.num_layers) for layer in hidden_layers)
        num_layers = max(self.hidden_layers)
        self.embed_tokens = TokenEmbedding("model.embed_tokens", config.num_embeddings, config.width)
        self.layers = [DecoderLayer(f"model.layers.{i}", spec, i) for i, spec in enumerate(config.layers[:num_layers])]
        self.norm = hidden_norm("model.norm", config.width, config.norm) if num_layers == config.num_layers else None
        self.ropes = ropes_of(config.layers)

    @property
    def width(self) -> int:
        """Width of one layer's hidden states."""
        return self.config.width

    def checkpoint_name(self, name: str) -> str | None:
        name = whole_name(name).replace("model.language_model.", "model.")
        if name.endswith("rotary_emb.inv_freq") or name.startswith(("lm_head.", "visual.", "model.visual.")):
            return None
        if name == "model.norm.weight" and self.norm is None:
            return None
        _, _, rest = name.partition("model.layers.")
        return None if rest and int(rest.partition(".")[0]) >= len(self.layers) else name

    def encode(self, token_ids: Sequence[Sequence[int]], lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Return for each prompt the concatenated hidden states of the chosen layers [L_i, layers * D].

        `lengths`: how many tokens of each prompt are text; those after it are padding, which attends to the text and is
        not attended to.
        """
        counts = [len(ids) for ids in token_ids]
        batch = _batch(counts, counts if lengths is None else lengths, backend.device())
        positions_T = torch.cat([torch.arange(count) for count in counts])
        x_TD = self._embedded(token_ids)
        return list(self._states(x_TD, positions_T.expand(self.ropes.num_axes, -1), batch).split(counts))

    def _embedded(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the embeddings [T, D] of all prompts."""
        return self.embed_tokens(torch.tensor([token for ids in token_ids for token in ids], device=backend.device()))

    def _states(self, x_TD: Tensor, positions_AT: Tensor, batch: UncachedBatch) -> Tensor:
        """Return the chosen layers' states [T, layers * D]; updates x."""
        ropes = self.ropes.tables(positions_AT.contiguous().to(backend.device()))
        states = empty((len(x_TD), len(self.hidden_layers) * self.width), x_TD.dtype)
        self._keep(states, 0, x_TD)
        for i, layer in enumerate(self.layers, start=1):
            with scope():
                layer(x_TD, batch, ropes[i - 1])
                is_last = i == self.config.num_layers
                self._keep(states, i, self.norm(x_TD) if is_last and self.norm else x_TD)
        return states

    def _keep(self, states: Tensor, layer: int, x_TD: Tensor) -> None:
        for place, kept in enumerate(self.hidden_layers):
            if kept == layer:
                states[:, place * self.width : (place + 1) * self.width] = x_TD


def build(config: Mapping[str, Any], hidden_layers: Sequence[int] = (-1,)) -> DecoderEncoder:
    """Return the encoder that a text encoder's config.json describes."""
    return DecoderEncoder(text_side(config), hidden_layers)


def text_side(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the language model of a text encoder's config.json."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedConfig(f"model_type is {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    if model_type == "qwen3":
        return decoder_config(config, qk_norm=True, default_head_width=QWEN3_HEAD_WIDTH)
    return decoder_config(config, qkv_bias=True, output_bias=False)


def _counted(layer: int, num_layers: int) -> int:
    counted = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= counted <= num_layers:
        raise UnsupportedConfig(
            f"hidden states of layer {layer} are read, but the text encoder has {num_layers} layers"
        )
    return counted


def _batch(counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> UncachedBatch:
    starts = starts_of(counts)
    if list(counts) == list(lengths):
        return UncachedBatch(starts)
    is_text = torch.cat([torch.arange(count) < length for count, length in zip(counts, lengths, strict=True)])
    rows = torch.arange(len(is_text))
    return UncachedBatch(
        starts,
        text_rows=rows[is_text].to(device),
        text_starts=starts_of(lengths),
        padding_rows=rows[~is_text].to(device),
        padding_starts=starts_of(c - n for c, n in zip(counts, lengths, strict=True)),
    )
