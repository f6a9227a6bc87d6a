"""The engine's interface to a model, and the plain-data inputs of an encoder pass, in memory any rank may map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.layers.attention import KvLayer
from tilewright.layers.batch import Batch, FeatureRun, WantedStates
from tilewright.layers.cost import DecoderCost, PredictorCost
from tilewright.ops import backend
from tilewright.ops.attention import KvCache, bytes_per_token, elements_per_token
from tilewright.ops.plan import empty
from tilewright.types import MediaKind, Medium, ModelInputs


@dataclass(frozen=True)
class MediaItem:
    """A medium as an encoder reads it: made of a Medium, and on every rank of a row of a step's `encoded`."""

    kind: MediaKind
    grid: tuple[int, int, int]
    tiling: tuple[int, int]
    first_row: int  # in the buffer
    num_rows: int
    num_features: int  # rows of the encoder's result
    feature_width: int = 0  # of features that came with the request; 0: the medium is to be encoded

    @classmethod
    def of(cls, medium: Medium) -> MediaItem:
        region = medium.region
        num_features = medium.num_states or medium.num_features
        rows = region.first_row, region.num_rows
        return cls(medium.kind, medium.grid, medium.tiling, *rows, num_features, medium.feature_width)


@dataclass(frozen=True)
class MediaBatch:
    """Media that a step encodes, and the buffer in which their patches lie."""

    buffer: Tensor  # [rows, width]: the patches of all requests
    items: tuple[MediaItem, ...]

    @classmethod
    def of(cls, buffer: Tensor, media: Sequence[Medium]) -> MediaBatch:
        return cls(buffer, tuple(MediaItem.of(medium) for medium in media))

    def features(self, item: MediaItem) -> Tensor:
        """Return a copy of the features that came with an item [num_features, width]."""
        values = self.buffer[item.first_row : item.first_row + item.num_rows].reshape(-1)
        count = item.num_features * item.feature_width
        return values[:count].view(item.num_features, item.feature_width).to(backend.device(), copy=True)

    def rows(self, items: Sequence[MediaItem]) -> Tensor:
        """Return the concatenated rows of some items: a view if they are contiguous, else one copy."""
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
    """Keys and values stored per token."""

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
        """Return the bytes per token in a type of `itemsize` bytes, or in one of 8 bits with its scales."""

        def per_head(width: int) -> int:
            if byte_dtype is not None:
                return bytes_per_token(width, byte_dtype)
            return elements_per_token(width) * itemsize

        return sum(layer.num_heads * per_head(layer.head_width) for layer in self.layers)

    def empty_caches(
        self, num_pages: int, page_size: int, dtype: torch.dtype, window_pages: Mapping[int, int] | None = None
    ) -> list[KvCache]:
        """Return a cache for each layer, with `num_pages` pages, or those that `window_pages` has for its window."""
        counts = window_pages or {}
        return [
            KvCache.empty(counts.get(layer.window, num_pages), page_size, layer.num_heads, layer.head_width, dtype)
            for layer in self.layers
        ]


@dataclass(frozen=True)
class CrossSpec(KvSpec):
    """Keys and values that cross-attention layers store per encoder state."""

    max_states: int  # of one medium


@dataclass(frozen=True)
class StateSpec:
    """State of one sequence in recurrent layers."""

    num_layers: int
    conv_shape: tuple[int, int]  # W - 1 inputs of C channels, in the model's dtype
    delta_shape: tuple[int, int, int]  # H heads of K x V, fp32

    def bytes_per_slot(self, itemsize: int) -> int:
        return self.num_layers * (math.prod(self.conv_shape) * itemsize + math.prod(self.delta_shape) * 4)


class Predictor(Protocol):
    """Drafts the second next token from the hidden state of a token and the token after it."""

    @property
    def width(self) -> int:
        """Width of a hidden state."""

    def draft_cost(self) -> PredictorCost:
        """Return the cost of its passes."""

    def forward_with_hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits of the model's `forward`, and the hidden states of all tokens [T, D]."""

    def draft(
        self, next_token_ids_T: Tensor, hidden_TD: Tensor, batch: Batch, next_feature_runs: Sequence[FeatureRun] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return logits [R, V] of the second token after each logit row of the batch, and their hidden states [R, D].

        Such a state replaces the hidden state of the next token, to draft a further one. Every row stores its key.
        """


class Model(Protocol):
    """A network whose weights are `weights.spec.Weight`s found by walking its attributes."""

    vocab_size: int
    max_context: int
    num_position_axes: int

    @property
    def kv_spec(self) -> KvSpec:
        """Keys and values that its self-attention layers store."""

    @property
    def num_embeddings(self) -> int:
        """Tokens that it can read; those from vocab_size on are never generated."""

    @property
    def cross_spec(self) -> CrossSpec | None:
        """Keys and values that its cross-attention layers store; None if features replace tokens."""

    @property
    def state_spec(self) -> StateSpec | None:
        """State of a sequence in its recurrent layers; None without any."""

    @property
    def predictor(self) -> Predictor | None:
        """The multi-token predictor; None if the checkpoint has none, or it was not loaded."""

    def cost(self) -> DecoderCost:
        """Return the cost of a token in the text model, without a vision tower."""

    def fit_context(self, max_context: int) -> None:
        """Prepare position tables for sequences of up to `max_context` tokens."""

    def checkpoint_name(self, name: str) -> str | None:
        """Return the model's name for a tensor of the checkpoint; None for an unused one."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the fp32 logits [R, V] of the rows the batch asks for."""

    def forward_with_states(self, batch: Batch, wanted: WantedStates) -> tuple[Tensor, Tensor]:
        """Return the logits of `forward`, and the hidden states that are wanted [M, D], in memory of their own."""

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        """Return the features [num_features, width] of each item, from one pass over all of them."""

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split rows of `encode`'s result into embeddings [M, D] and what is added after the first layers."""

    def store_cross_states(self, states_ND: Tensor, slots_N: Tensor, kv_caches: Sequence[KvCache]) -> None:
        """Write the keys and values of encoder states to each cross-attention layer's cache."""


class Processor(Protocol):
    """Turns a conversation, or a prompt with its media, into model inputs.

    `accepts` lists its kinds of media. `chat` and `prompt` take `is_known`, which says by a medium's key whether its
    features are cached, so that it need not be decoded; and `budget`, which bounds the text that is tokenized.
    """

    @property
    def accepts(self) -> Sequence[MediaKind]: ...

    @property
    def media_buffer(self) -> MediaBuffer | None:
        """Buffer for the inputs of the model's encoder; None if it takes no media."""

    @property
    def chat(self) -> Callable[..., ModelInputs]: ...

    @property
    def prompt(self) -> Callable[..., ModelInputs]: ...

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where there is none."""

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        """Tokens of an image's placeholder in a prompt; empty if it takes no images."""


@dataclass(frozen=True)
class Family:
    """A model_type: how to build its network and its processor."""

    build: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Model]  # from the config and tensor shapes
    make_processor: Callable[..., Processor] | None = None  # None: text only
    # Prefix of the predictor's tensor names, which are skipped if nothing is drafted.
    predictor_prefix: str | None = None
    # Makes the `SpeechModel` (models/qwen3_omni/model.py) from the config and tensor shapes, or None if the checkpoint
    # has no voice.
    build_speech: Callable[..., Any] | None = None
