"""Inputs of a language model's layers besides the hidden state: positions, KV pages and recurrent states.

Legend of shape suffixes: T packed tokens, D model width, H query heads, G kv heads, K head width, B sequences, V
vocabulary, A rope axes, M media tokens, R tokens that attend to encoder states, S spans of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.attention import KvCache, kv_store, paged_attention, varlen_attention


def starts_of(lengths: Iterable[int]) -> Tensor:
    """Return the starts of packed sequences of these lengths, and the end of the last: int32 [B + 1] on the device.

    On a device other than the host they are computed there from the numbers in kernel calls: a copy would have to wait.
    """
    place = backend.place()
    if place.is_host:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=backend.device())
    options: dict[str, Any] = {"dtype": torch.int32, "device": place.torch_device}
    runs = [torch.full((len(list(run)),), length, **options) for length, run in itertools.groupby(lengths)]
    return torch.cat([torch.zeros(1, **options), *runs]).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class FeatureRun:
    """Encoder features that take the place of a run of token embeddings, and those added after the first layers.

    A ModelRunner makes it of a row of `feature_runs` (engine/run/inputs.py) and the features it has.
    """

    rows_M: Tensor  # int64, which of the batch's tokens
    embeddings_MD: Tensor
    deepstack: Sequence[Tensor] = ()  # [M, D] each: added to the hidden state after layer 0, 1, ...


@dataclass(frozen=True)
class WantedStates:
    """Hidden states of some tokens after `num_layers` layers, for a reader other than the head."""

    rows_M: Tensor  # int64, which of the batch's tokens
    num_layers: int  # at least 1, and not all of them


@dataclass(frozen=True)
class CrossBatch:
    """Tokens that attend to encoder states, in spans that attend to the same states, and the pages of those.

    Tokens that attend to none (text alone, or before the first image) are left out: a cross-attention layer does not
    change them.
    """

    rows_R: Tensor | None  # int64, which of the batch's tokens; None: all
    query_starts: Tensor  # int32 [S + 1]: span s has tokens query_starts[s] to query_starts[s + 1] of the R
    lengths: Tensor  # int32 [S]: encoder states that span s attends to
    block_table: Tensor  # int32 [S, pages]
    kv_caches: Sequence[KvCache]  # one per cross-attention layer


@dataclass(frozen=True)
class StateBatch:
    """Slots of recurrent states: where each sequence's state is read, and the states after its tokens are written."""

    read_slots: Tensor  # int32 [B]; negative: the zero state
    write_slots: Tensor  # slot of the state after each token; negative: not stored
    conv_states: Sequence[Tensor]  # per recurrent layer [slots, W - 1, C]
    delta_states: Sequence[Tensor]  # per recurrent layer [slots, H, K, V], fp32


@dataclass(frozen=True)
class PageTable:
    """Slots and pages of a batch in layers that do not keep all tokens of a sequence."""

    slots_T: Tensor  # int64: like the batch's slots_T, in other pages
    block_table: Tensor  # int32 [B, pages]; released pages are replaced by one that is always zero


class SequenceBatch(Protocol):
    """Inputs of self-attention and recurrent layers: where the sequences of a batch begin, and what they attend to."""

    @property
    def query_starts(self) -> Tensor:
        """int32 [B + 1]: sequence b has tokens query_starts[b] to query_starts[b + 1]."""

    @property
    def states(self) -> StateBatch | None: ...

    def attend(
        self,
        layer: int,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        *,
        window: int,
        scale: float | None,
        soft_cap: float,
    ) -> Tensor:
        """Return the attention output of each query [T, H, K] in self-attention layer `layer` (ops/attention.py)."""


@dataclass(frozen=True)
class Batch:
    """Tokens of several sequences, packed one sequence after the other."""

    token_ids_T: Tensor  # int64
    positions_AT: Tensor  # int64
    slots_T: Tensor  # int64: where each token's key and value are stored, page * page_size + offset
    query_starts: Tensor  # int32 [B + 1]: sequence b has tokens query_starts[b] to query_starts[b + 1]
    kv_lengths: Tensor  # int32 [B]: keys of sequence b, including those of its tokens here
    block_table: Tensor  # int32 [B, pages]
    kv_caches: Sequence[KvCache]  # one per self-attention layer
    windows: Mapping[int, PageTable] = field(default_factory=dict)  # for layers with these windows; others: as above
    logit_rows: Tensor | None = None  # int64: tokens whose logits are wanted; None: all
    feature_runs: Sequence[FeatureRun] = ()
    cross: CrossBatch | None = None  # None: no token attends to encoder states
    states: StateBatch | None = None  # None: the model has no recurrent layers

    def attend(
        self,
        layer: int,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        *,
        window: int,
        scale: float | None,
        soft_cap: float,
    ) -> Tensor:
        """Store the tokens' keys and values in the layer's cache, then attend over it."""
        cache, pages = self.kv_caches[layer], self.windows.get(window, self)
        kv_store(k_TGK, v_TGK, cache, pages.slots_T)
        rules: dict[str, Any] = {"window": window, "scale": scale, "soft_cap": soft_cap}
        return paged_attention(q_THK, cache, pages.block_table, self.query_starts, self.kv_lengths, **rules)


@dataclass(frozen=True)
class UncachedBatch:
    """Whole sequences that are read once, as by a text encoder: they attend to themselves, and nothing is stored.

    Rows of `padding` come after a sequence's text: they attend to all of the text, and nothing attends to them.
    """

    query_starts: Tensor  # int32 [B + 1]
    text_rows: Tensor | None = None  # int64: rows that are text; None: all
    text_starts: Tensor | None = None  # int32 [B + 1], of the text's rows alone
    padding_rows: Tensor | None = None  # int64
    padding_starts: Tensor | None = None  # int32 [B + 1]
    states: StateBatch | None = None

    def attend(
        self,
        layer: int,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGK: Tensor,
        *,
        window: int,
        scale: float | None,
        soft_cap: float,
    ) -> Tensor:
        rules: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
        if self.text_rows is None:
            return varlen_attention(q_THK, k_TGK, v_TGK, self.query_starts, causal=True, window=window, **rules)
        k, v = k_TGK[self.text_rows], v_TGK[self.text_rows]
        assert self.text_starts is not None and self.padding_rows is not None and self.padding_starts is not None
        out = q_THK.new_empty(q_THK.shape)
        out[self.text_rows] = varlen_attention(
            q_THK[self.text_rows], k, v, self.text_starts, causal=True, window=window, **rules
        )
        out[self.padding_rows] = varlen_attention(
            q_THK[self.padding_rows], k, v, self.padding_starts, self.text_starts, **rules
        )
        return out
