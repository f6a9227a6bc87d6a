"""What the engine asks of a model, and what an encoder reads in one pass: plain data, in memory any rank may map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.layers.attention import KvLayer
from tilewright.layers.batch import Batch, MediaRun
from tilewright.layers.cost import DecoderCost, PredictorCost
from tilewright.ops import backend
from tilewright.ops.attention import KvCache, bytes_per_token, elements_per_token
from tilewright.ops.plan import empty
from tilewright.types import MediaKind, Medium, ModelInputs


@dataclass(frozen=True)
class MediaItem:
    """A medium of the batch."""

    kind: MediaKind
    grid: tuple[int, int, int]
    tiling: tuple[int, int]
    first_row: int  # in the buffer
    num_rows: int
    num_features: int  # rows of the encoder's result
    feature_width: int = 0  # of features that came with the request; 0: it is to be encoded

    @classmethod
    def of(cls, medium: Medium) -> MediaItem:
        region = medium.region
        num_features = medium.num_states or medium.num_features
        rows = region.first_row, region.num_rows
        return cls(medium.kind, medium.grid, medium.tiling, *rows, num_features, medium.feature_width)


@dataclass(frozen=True)
class MediaBatch:
    """Media to encode, and the buffer in which their patches lie."""

    buffer: Tensor  # [rows, width]: those of all requests
    items: tuple[MediaItem, ...]

    @classmethod
    def of(cls, buffer: Tensor, media: Sequence[Medium]) -> MediaBatch:
        return cls(buffer, tuple(MediaItem.of(medium) for medium in media))

    def features(self, item: MediaItem) -> Tensor:
        """Those of an item that came with its features [num_features, width], in memory of their own."""
        values = self.buffer[item.first_row : item.first_row + item.num_rows].reshape(-1)
        count = item.num_features * item.feature_width
        return values[:count].view(item.num_features, item.feature_width).to(backend.device(), copy=True)

    def rows(self, items: Sequence[MediaItem]) -> Tensor:
        """The rows of some items, one after the other: where they lie if they are neighbours, else copied once."""
        runs: list[tuple[int, int]] = []
        for item in items:
            end = item.first_row + item.num_rows
            if runs and runs[-1][1] == item.first_row:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((item.first_row, end))
        parts = [self.buffer[begin:end] for begin, end in runs]
        if len(parts) == 1:
            return parts[0].to(backend.device())
        copied = empty((sum(map(len, parts)), self.buffer.shape[1]), self.buffer.dtype)
        return torch.cat([part.to(copied.device) for part in parts], out=copied)


@dataclass(frozen=True)
class KvSpec:
    """The keys and values stored for one token."""

    layers: tuple[KvLayer, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def windows(self, max_context: int) -> tuple[int, ...]:
        """Return the windows of layers that keep less than a whole context, shortest first.

        A window as long as the context hides nothing: such layers share the pages of those that see all tokens.
        """
        return tuple(sorted({layer.window for layer in self.layers if 0 < layer.window < max_context}))

    def in_window(self, window: int) -> KvSpec:
        """Return the layers with a window."""
        return KvSpec(tuple(layer for layer in self.layers if layer.window == window))

    def outside(self, windows: Sequence[int]) -> KvSpec:
        """Return the layers with none of the windows."""
        return KvSpec(tuple(layer for layer in self.layers if layer.window not in windows))

    def bytes_per_token(self, itemsize: int, byte_dtype: torch.dtype | None = None) -> int:
        """In a type of `itemsize` bytes, or in one of 8 bits with its scales."""

        def per_head(width: int) -> int:
            if byte_dtype is not None:
                return bytes_per_token(width, byte_dtype)
            return elements_per_token(width) * itemsize

        return sum(layer.num_heads * per_head(layer.head_width) for layer in self.layers)

    def empty_caches(
        self, num_pages: int, page_size: int, dtype: torch.dtype, window_pages: Mapping[int, int] | None = None
    ) -> list[KvCache]:
        """Return a cache for each layer: of so many pages, or of as many as `window_pages` says of its window."""
        counts = window_pages or {}
        return [
            KvCache.empty(counts.get(layer.window, num_pages), page_size, layer.num_heads, layer.head_width, dtype)
            for layer in self.layers
        ]


@dataclass(frozen=True)
class CrossSpec(KvSpec):
    """The keys and values that cross-attention layers store for one encoder state."""

    max_states: int  # of one medium


@dataclass(frozen=True)
class StateSpec:
    """The state one sequence has in recurrent layers."""

    num_layers: int
    conv_shape: tuple[int, int]  # W - 1 inputs of C channels, in the model's dtype
    delta_shape: tuple[int, int, int]  # H heads of K x V, fp32

    def bytes_per_slot(self, itemsize: int) -> int:
        return self.num_layers * (math.prod(self.conv_shape) * itemsize + math.prod(self.delta_shape) * 4)


class Predictor(Protocol):
    """Drafts the second next token from the hidden state of a token and the token after it."""

    @property
    def width(self) -> int:
        """Of a hidden state."""

    def draft_cost(self) -> PredictorCost:
        """What its passes read and multiply."""

    def forward_with_hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits that the model's `forward` gives, and the hidden states of all tokens [T, D]."""

    def draft(
        self, next_token_ids_T: Tensor, hidden_TD: Tensor, batch: Batch, next_media: Sequence[MediaRun] = ()
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the second token after each of the batch's logit rows, and the states [R, D] they are from.

        A state stands for the hidden state of the next token, to draft a further one. Every row leaves its key.
        """


class Model(Protocol):
    """A network whose weights are `weights.spec.Weight`s found by walking its attributes."""

    vocab_size: int
    max_context: int
    num_position_axes: int

    @property
    def kv_spec(self) -> KvSpec:
        """What its self-attention layers keep."""

    @property
    def num_embeddings(self) -> int:
        """Tokens that may be read; those from vocab_size on are never generated."""

    @property
    def cross_spec(self) -> CrossSpec | None:
        """What its cross-attention layers keep; None where features take the place of tokens."""

    @property
    def state_spec(self) -> StateSpec | None:
        """What its recurrent layers keep of a sequence; None where there are none."""

    @property
    def predictor(self) -> Predictor | None:
        """Its multi-token predictor; None where the checkpoint has none, or it was not loaded."""

    def cost(self) -> DecoderCost:
        """What a token reads and multiplies, of the text side: a vision tower is no part of it."""

    def fit_context(self, max_context: int) -> None:
        """Prepares position tables for sequences of up to so many tokens."""

    def checkpoint_name(self, name: str) -> str | None:
        """The model's name for a tensor of the checkpoint; None for one that is not used."""

    def forward(self, batch: Batch) -> Tensor:
        """fp32 logits [R, V] of the rows the batch asks for."""

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        """The features [num_features, width] of each item, from one pass over all of them."""

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of `encode`'s result as embeddings [M, D] and what is added after the first layers."""

    def store_cross_states(self, states_ND: Tensor, slots_N: Tensor, kv_caches: Sequence[KvCache]) -> None:
        """Writes the keys and values of encoder states, for each cross-attention layer into its cache."""


class Processor(Protocol):
    """Turns what a user sends into what the model reads: a conversation, or a prompt with its media.

    `accepts` lists the kinds of media it takes. `chat` and `prompt` take `is_known`, which says by its key whether a
    medium's features are cached: it is not decoded then; and `budget`, which bounds the text that is tokenized.
    """

    @property
    def accepts(self) -> Sequence[MediaKind]: ...

    @property
    def media_buffer(self) -> MediaBuffer | None:
        """Where it writes what the model's encoder reads; None where it takes no media."""

    @property
    def chat(self) -> Callable[..., ModelInputs]: ...

    @property
    def prompt(self) -> Callable[..., ModelInputs]: ...

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        """The tokens of a picture's placeholder in a prompt; empty where it takes none."""


@dataclass(frozen=True)
class Family:
    """A model_type: how its network and its processor are made."""

    build: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Model]  # from the config and tensor shapes
    make_processor: Callable[..., Processor] | None = None  # None: text only
    # Prefix of the names of a predictor's tensors: they are left out where nothing is drafted.
    predictor_prefix: str | None = None
    # The `Speaker` of its answers (models/speaking.py), from the config and tensor shapes; None from it: the checkpoint
    # has no voice.
    build_speech: Callable[..., Any] | None = None
