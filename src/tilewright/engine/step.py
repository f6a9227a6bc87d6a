"""The work of one step, and what was sampled from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilewright.engine.cross.group import CrossGroup
from tilewright.engine.sequence import Sequence
from tilewright.types import FinishReason, Medium, TokenLogprob

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
