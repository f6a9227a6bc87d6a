"""The work of one step, the limits on it, its sampled tokens, and the interface of sequence resources."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from tilewright.engine.kv.cross import CrossGroup
from tilewright.engine.options import EngineOptions
from tilewright.engine.schedule.sequence import Sequence
from tilewright.types import FinishReason, Medium, RequestError, TokenLogprob


@dataclass(frozen=True)
class StepLimits:
    """Limits on one step.

    A step's weights are read once: at 20 GB/s and 1 TFLOP/s in bf16, reading costs as much as computing 50 rows. At
    1,024 tokens it is 5 % of the step, and larger steps gain nothing but make decoding sequences wait longer. A few
    more let an image of 1024 x 1024, 1,024 features, fit one step with its question: 18 left-over tokens took another
    0.2 of 3.3 seconds.
    """

    max_context: int
    max_tokens_per_step: int = EngineOptions.max_tokens_per_step
    max_sequences: int = EngineOptions.max_sequences
    # Two images of 1024 x 1024 with patches of 16 pixels; the encoder's products peak at far fewer rows.
    max_encode_patches: int = 8192
    # Two images of 512 x 512, or a single larger one, while others wait for the next token of their answers.
    max_encode_patches_beside_decodes: int = 2048
    # Below the 50 rows at which computing costs as much as reading the weights, a rejected draft costs little.
    max_rows_with_drafts: int = 32
    # Logits of 128 rows over 152,000 tokens are 78 MB.
    max_prompt_rows: int = 128

    @property
    def max_draft_rows(self) -> int:
        """Rows of a step with drafts: at most half of it, so that the rest is for prompts."""
        return min(self.max_rows_with_drafts, self.max_tokens_per_step // 2)

    def max_patches(self, has_decodes: bool) -> int:
        """Return how many patches the encoder accepts in a step, unless a single medium has more."""
        if not has_decodes:
            return self.max_encode_patches
        return min(self.max_encode_patches, self.max_encode_patches_beside_decodes)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise RequestError(f"{name} is {value}, expected at least 1")
        if self.max_sequences > self.max_tokens_per_step:
            raise RequestError(
                f"max_sequences is {self.max_sequences}, more than max_tokens_per_step, {self.max_tokens_per_step}: "
                "each running sequence decodes one token per step"
            )


NO_TOKEN = -1  # the token sampled from a row of NaN


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start .. stop of a sequence, drafts included; the last num_logits of them give logits.

    Valid until the scheduler's `update`, which adds tokens to the sequence. Its numbers are computed once: as
    properties, or with frozen fields, they took a tenth of a step's Python time.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    draft_token_ids: Items[int] = ()
    is_forced: bool = False  # the sequence's grammar allows only these drafts
    stop: int = field(init=False)
    num_drafts: int = field(init=False)
    num_sampled: int = field(init=False)  # rows that a token is drawn from: the last known token's and each draft's
    num_prompt_rows: int = field(init=False)  # rows, before the sampled ones, for log-probabilities of the prompt
    num_logits: int = field(init=False)

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.stop = self.start + self.num_tokens
        self.num_drafts = len(self.draft_token_ids)
        self.num_sampled = 1 + self.num_drafts if self.stop >= sequence.num_tokens else 0
        self.num_prompt_rows = 0
        if sequence.needs_prompt_logprobs:
            first = len(sequence.prompt_logprobs) - 1  # the row of token i is about token i + 1
            self.num_prompt_rows = max(0, self.stop - self.num_sampled - max(self.start, first))
        self.num_logits = self.num_prompt_rows + self.num_sampled

    @property
    def token_ids(self) -> list[int]:
        known = self.sequence.token_ids[self.start : self.stop]
        return [*known, *self.draft_token_ids] if self.num_drafts else known


def last_rows(sizes: Iterable[int], counts: Iterable[int]) -> list[int]:
    """Return the indices of the last counts[i] rows of each run of sizes[i] rows, the runs concatenated."""
    rows: list[int] = []
    end = 0
    for size, count in zip(sizes, counts, strict=True):
        end += size
        rows.extend(range(end - count, end))
    return rows


@dataclass(frozen=True)
class DraftInput:
    """Computed tokens start .. stop of a sequence that a multi-token predictor reads, and its number of drafts."""

    sequence: Sequence
    start: int
    stop: int
    token_ids: list[int]  # the token after each of them
    first_row: int  # row in the step of the first of these tokens
    num_drafts: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """Chunks to compute in one batch, media to encode before, and cross-attention groups to fill before."""

    chunks: list[Chunk] = field(default_factory=list)
    encode: list[Medium] = field(default_factory=list)  # distinct, not in the feature cache
    cross_groups: list[CrossGroup] = field(default_factory=list)  # distinct, with pages that are not filled yet
    keeps_hidden: bool = False  # whether the hidden states of all its tokens are kept, for a predictor

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])  # a list is summed faster than a generator

    @property
    def num_logits(self) -> int:
        return sum([chunk.num_logits for chunk in self.chunks])

    @property
    def has_decodes(self) -> bool:
        """Return whether a sequence waits for the next token of its answer."""
        return any(chunk.sequence.num_output_tokens for chunk in self.chunks)


@dataclass(slots=True)
class Sampled:
    """Tokens sampled from a chunk: the accepted drafts and the token after them; none in the middle of a prompt.

    If all logits are NaN, the token is NO_TOKEN.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, or none if not asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt tokens after the prompt rows


@dataclass(slots=True)
class SequenceOutput:
    """Tokens that a step added to a sequence, and why it ended if it did."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    has_stop_token: bool  # its last token ended the answer, and is not part of the text


class SequenceResource:
    """One kind of memory that a sequence needs to run. The defaults are those of a resource that never runs short.

    Admission is `match`, then `has_room`, then `admit`. In every step `chunk_end` and `prepare` bound what a sequence
    computes, `plan` allocates what its chunk writes to, and `commit` follows once that is final. `release` returns
    everything, whatever the sequence holds by then.
    """

    max_drafts_per_step = sys.maxsize
    # Whether a step that raised may be computed again: it overwrites with the same values.
    can_repeat_steps = True

    def check(self, sequence: Sequence) -> None:
        """Raise RequestError for a sequence that could never be held."""

    def begin_step(self) -> None:
        """Prepare for the prompts of a step."""

    def match(self, sequence: Sequence, num_tokens: int) -> int:
        """Hold what is cached of the first `num_tokens` tokens; return how many of them need not be computed."""
        return num_tokens

    def has_room(self, sequence: Sequence, num_cached: int) -> bool:
        """Return whether a waiting sequence can be admitted; matches beyond `num_cached` tokens are released."""
        return True

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Allocate what the sequence needs after `num_cached` cached tokens. All resources have room for it."""

    def chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        """Return where a prompt's chunk of at most `stop` should end, in a step with `budget` prompt tokens."""
        return stop

    def prepare(self, step: Step, sequence: Sequence, start: int, stop: int) -> int:
        """Add to the step what tokens start .. stop need first; return up to which of them it can be ready."""
        return stop

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether the inputs of a decoding sequence's next token are ready."""
        return True

    def draft_room(self) -> int:
        """Return how many drafts a sequence may have now."""
        return sys.maxsize

    def plan(self, chunk: Chunk) -> None:
        """Allocate the memory that a chunk of the step writes to, beyond its pages."""

    def commit(self, sequence: Sequence) -> None:
        """Record that `sequence.num_computed_tokens` tokens, without rejected drafts, are computed and final."""

    def release(self, sequence: Sequence) -> None:
        """Release all that a sequence holds, if anything."""

    def stats(self) -> dict[str, Any]:
        """Return this resource's fields of `Stats`."""
        return {}
