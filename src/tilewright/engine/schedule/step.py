"""The work of one step, the limits on it, its sampled tokens, and the interface of what sequences hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tilewright.engine.kv.cross import CrossGroup
from tilewright.engine.schedule.sequence import Sequence
from tilewright.types import FinishReason, Medium, RequestError, TokenLogprob


@dataclass(frozen=True)
class StepLimits:
    """How much one step may do.

    A step's weights are read once: at 20 GB/s and 1 TFLOP/s in bf16, reading costs as much as computing 50 rows. At
    1,024 tokens it is 5 % of the step, and larger steps gain nothing but make decoding sequences wait longer. A few
    more let a picture of 1024 x 1024, 1,024 features, go in one step with the question about it: 18 tokens left over
    took another 0.2 of 3.3 seconds.
    """

    max_context: int
    max_tokens_per_step: int = 1152
    max_sequences: int = 64
    # Two pictures of 1024 x 1024 at 16 pixels a patch; the encoder's products are at their peak from far fewer rows.
    max_encode_patches: int = 8192
    # Two of 512 x 512, or a single larger one, while others wait for the next token of their answers.
    max_encode_patches_beside_decodes: int = 2048
    # Below the 50 rows at which computing costs as much as reading the weights, a rejected draft costs little.
    max_rows_with_drafts: int = 32
    # Logits of 128 rows over 152,000 tokens are 78 MB.
    max_prompt_rows: int = 128

    @property
    def max_draft_rows(self) -> int:
        """Rows of a step with drafts: they leave half of it to prompts, however small it is."""
        return min(self.max_rows_with_drafts, self.max_tokens_per_step // 2)

    def max_patches(self, has_decodes: bool) -> int:
        """How many the encoder takes in a step, unless a single medium has more."""
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


NO_TOKEN = -1  # sampled from logits of which none is a number


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start .. stop of a sequence, drafts included; the last num_logits of them give logits.

    Valid until the scheduler's `update`, which takes the drafts off the sequence. All a step asks of it is computed
    when it is made: as properties the numbers below took a tenth of a step's Python, and frozen fields as much.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_drafts: int = 0
    is_forced: bool = False  # the drafts are all that the sequence's grammar allows
    stop: int = field(init=False)
    num_sampled: int = field(init=False)  # rows that a token is drawn from: of the last known token and of each draft
    num_prompt_rows: int = field(init=False)  # rows, before the sampled ones, for log-probabilities of the prompt
    num_logits: int = field(init=False)

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.stop = self.start + self.num_tokens
        self.num_sampled = 1 + self.num_drafts if self.stop >= sequence.num_tokens else 0
        self.num_prompt_rows = 0
        if sequence.wants_prompt_logprobs:
            first = len(sequence.prompt_logprobs) - 1  # the row of token i is about token i + 1
            self.num_prompt_rows = max(0, self.stop - self.num_sampled - max(self.start, first))
        self.num_logits = self.num_prompt_rows + self.num_sampled

    @property
    def token_ids(self) -> list[int]:
        known = self.sequence.token_ids[self.start : self.stop]
        return known + self.sequence.draft_token_ids if self.num_drafts else known


def last_rows(sizes: Iterable[int], counts: Iterable[int]) -> list[int]:
    """The numbers of the last counts[i] rows of each run of sizes[i] rows, the runs one after the other."""
    rows: list[int] = []
    end = 0
    for size, count in zip(sizes, counts, strict=True):
        end += size
        rows.extend(range(end - count, end))
    return rows


@dataclass(frozen=True)
class DraftInput:
    """Computed tokens start .. stop of a sequence as a multi-token predictor reads them, and the drafts it makes."""

    sequence: Sequence
    start: int
    stop: int
    token_ids: list[int]  # of the tokens that follow each of them
    first_row: int  # of the step's rows, the first of these tokens'
    num_drafts: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """Chunks to compute in one batch, the media to encode before, and the cross-attention groups to fill before."""

    chunks: list[Chunk] = field(default_factory=list)
    encode: list[Medium] = field(default_factory=list)  # distinct, not in the feature cache
    cross_groups: list[CrossGroup] = field(default_factory=list)  # distinct, with pages that are not filled yet

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])  # a list is summed faster than a generator

    @property
    def num_logits(self) -> int:
        return sum([chunk.num_logits for chunk in self.chunks])

    @property
    def has_decodes(self) -> bool:
        """Whether someone waits for the next token of an answer."""
        return any(chunk.sequence.num_output_tokens for chunk in self.chunks)


@dataclass(slots=True)
class Sampled:
    """What was sampled from a chunk: the accepted drafts and the token after them; none in the middle of a prompt.

    Where all logits are NaN, the token is NO_TOKEN.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, or none if not asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt tokens after the prompt rows


@dataclass(slots=True)
class Event:
    """What a step added to a sequence."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    has_stop_token: bool  # its last token ended the answer, and is no part of the text


class SequenceResource:
    """What a sequence needs of one kind of memory in order to run. The defaults are those of one that never runs short.

    Admission is `match`, then `has_room`, then `admit`. In every step `chunk_end` and `prepare` bound what a sequence
    computes, `plan` takes what its chunk writes to, and `commit` follows when that is known to be right. `release`
    gives all back, whatever the sequence has got by then.
    """

    max_drafts_per_step = sys.maxsize
    # Whether a step that raised may be computed again: what it wrote is overwritten with the same values.
    can_repeat_steps = True

    def check(self, sequence: Sequence) -> None:
        """RequestError for a sequence that could never be held."""

    def begin_step(self) -> None:
        """Called before prompts are scheduled."""

    def match(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens need not be computed: what is cached of them is held from now."""
        return num_tokens

    def has_room(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether a waiting sequence can be admitted; what `match` found beyond `num_cached` tokens is given back."""
        return True

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Takes what the sequence needs to run after `num_cached` cached tokens. All resources have room for it."""

    def chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        """Where a chunk of a prompt should end that may go up to `stop`, in a step with `budget` tokens for prompts."""
        return stop

    def prepare(self, step: Step, sequence: Sequence, start: int, stop: int) -> int:
        """Puts into the step what must be made before tokens start .. stop; up to which of them it can be."""
        return stop

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether what the next token of a decoding sequence reads is there."""
        return True

    def draft_room(self) -> int:
        """How many drafts a sequence may have now."""
        return sys.maxsize

    def plan(self, chunk: Chunk) -> None:
        """Takes the memory that a chunk of the step writes to, beyond its pages."""

    def commit(self, sequence: Sequence) -> None:
        """After a step: `sequence.num_computed_tokens` are computed, drafts that were rejected are not among them."""

    def release(self, sequence: Sequence) -> None:
        """Gives back all that a sequence holds, if it holds anything."""

    def stats(self) -> dict[str, Any]:
        """The fields of `Stats` that are this resource's."""
        return {}
