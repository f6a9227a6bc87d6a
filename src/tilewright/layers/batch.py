"""What the layers of a language model read besides the hidden state: positions, and where keys and states lie.

Legend of shape suffixes: T packed tokens, D model width, H query heads, G kv heads, K head width, B sequences,
V vocabulary, A rope axes, M tokens that are media, R tokens that attend to encoder states, S spans of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewright.ops.kv_cache import KvCache


@dataclass(frozen=True)
class MediaRun:
    """Encoder features that take the place of a run of token embeddings, and those added after the first layers."""

    rows_M: Tensor  # int64, which of the batch's tokens
    embeddings_MD: Tensor
    deepstack: Sequence[Tensor] = ()  # [M, D] each: added to the hidden state after layer 0, 1, ...


@dataclass(frozen=True)
class CrossBatch:
    """The tokens that attend to encoder states, in spans that attend to the same ones, and where those lie.

    Tokens that attend to none (text alone, or before the first picture) are left out: a cross-attention layer does not
    change them.
    """

    rows_R: Tensor | None  # int64, which of the batch's tokens; None: all
    query_starts: Tensor  # int32 [S + 1]: span s has tokens query_starts[s] to query_starts[s + 1] of the R
    lengths: Tensor  # int32 [S]: encoder states that span s attends to
    block_table: Tensor  # int32 [S, pages]
    kv_caches: Sequence[KvCache]  # one per cross-attention layer


@dataclass(frozen=True)
class StateBatch:
    """Where recurrent layers read the state before the tokens of each sequence, and write the states after them."""

    read_slots: Tensor  # int32 [B]; negative: the zero state
    write_slots: Tensor  # int32 [T]: where the state after each token is kept; negative: nowhere
    conv_states: Sequence[Tensor]  # per recurrent layer [slots, W - 1, C]
    delta_states: Sequence[Tensor]  # per recurrent layer [slots, H, K, V], fp32


@dataclass(frozen=True)
class Batch:
    """Tokens of several sequences, packed one sequence after the other."""

    token_ids_T: Tensor  # int64
    positions_AT: Tensor  # int64
    slots_T: Tensor  # int64: where each token's key and value are stored, page * page_size + place
    query_starts: Tensor  # int32 [B + 1]: sequence b has tokens query_starts[b] to query_starts[b + 1]
    kv_lengths: Tensor  # int32 [B]: keys of sequence b, those of its tokens here included
    block_table: Tensor  # int32 [B, pages]
    kv_caches: Sequence[KvCache]  # one per self-attention layer
    logit_rows: Tensor | None = None  # int64: tokens whose logits are wanted; None: all
    media: Sequence[MediaRun] = ()
    cross: CrossBatch | None = None  # None: no token attends to encoder states
    states: StateBatch | None = None  # None: the model has no recurrent layers
