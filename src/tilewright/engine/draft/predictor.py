"""Drafts by the checkpoint's multi-token predictor, which reads what each step computed.

The pages that hold its keys tell which tokens of a sequence it has read.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Protocol
from weakref import WeakKeyDictionary

from tilewright.engine.draft.drafter import Drafter
from tilewright.engine.schedule.sequence import Sequence, Status
from tilewright.engine.schedule.step import Chunk, DraftInput, Step

# One token in 16 may have been missed, and 32 in all: the last step of the answer before in a conversation, or a few
# steps that had too many sequences for drafts. The shortest pause is twice as long: after it no sequence is read any
# further.
MAX_MISSED_SHARE = 1 / 16
MAX_MISSED_TOKENS = 32


@dataclass
class _Count:
    start: int  # of the sequence's latest chunk
    num_read: int  # of the tokens before it, and of its own once they are read


class PredictorCoverage:
    """Remembers which tokens of each page the predictor has read, so that it is known for pages of the prefix cache.

    A sequence of which too much was not read is not read any further until it is admitted again: missing keys make
    drafts poor, and further passes would be wasted.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._read_by_page: defaultdict[int, int] = defaultdict(int)  # a bit for each of its tokens
        self._counts: WeakKeyDictionary[Sequence, _Count] = WeakKeyDictionary()

    def begin(self, chunk: Chunk) -> bool:
        """Whether enough was read of what is before a chunk that is about to be computed.

        The pages that it begins have nothing of their last use any more.
        """
        sequence, start, size = chunk.sequence, chunk.start, self.page_size
        for page in sequence.pages[-(-start // size) : -(-chunk.stop // size)]:
            self._read_by_page[page] = 0
        count = self._counts.get(sequence)
        if count is None or start <= count.start or start // size != count.start // size:
            self._count(sequence, start)  # it was admitted, perhaps again, or has filled a page
        else:
            count.start = start
        return self._is_enough(sequence)

    def end(self, sequence: Sequence, start: int, stop: int) -> bool:
        """The same when tokens start .. stop of the chunk were computed, and are about to be read.

        Of a page that they filled, the prefix cache may have given the sequence another's.
        """
        if start // self.page_size != stop // self.page_size:
            self._count(sequence, start)
        return self._is_enough(sequence)

    def add(self, sequence: Sequence, start: int, stop: int) -> None:
        """Counts tokens start .. stop of the chunk that was begun as read."""
        size = self.page_size
        for index in range(start // size, -(-stop // size)):
            first, last = max(start - index * size, 0), min(stop - index * size, size)
            self._read_by_page[sequence.pages[index]] |= (1 << last) - (1 << first)
        self._counts[sequence].num_read += stop - start

    def _count(self, sequence: Sequence, start: int) -> None:
        num_full, num_more = divmod(start, self.page_size)
        num_read = sum(self._read_by_page[page].bit_count() for page in sequence.pages[:num_full])
        if num_more:
            num_read += (self._read_by_page[sequence.pages[num_full]] & ((1 << num_more) - 1)).bit_count()
        self._counts[sequence] = _Count(start, num_read)

    def _is_enough(self, sequence: Sequence) -> bool:
        count = self._counts[sequence]
        return count.start - count.num_read <= min(MAX_MISSED_SHARE * count.start, MAX_MISSED_TOKENS)


class Policy(Protocol):
    """How many drafts to make, learnt from what they gave and what they took (engine/draft/policy.py)."""

    def choose(self, num_sequences: int, num_read: int) -> int | None: ...

    def record(self, num_proposed: int, num_right: int) -> None: ...

    def time_step(self, num_rows: int, took_s: float) -> None: ...

    def time_pass(self, num_sequences: int, took_s: float) -> None: ...


class DraftingRunner(Protocol):
    """What computes drafts from the hidden states of the step it ran last (engine/run/runner.py)."""

    keeps_hidden: bool

    def draft(self, draft_inputs: list[DraftInput]) -> list[list[int]]: ...


@dataclass(frozen=True)
class _Draft:
    """Tokens that may follow a sequence of so many tokens."""

    num_tokens: int
    token_ids: list[int]


class PredictorDrafter:
    """Proposes what the predictor drafted after the last step; where it drafts nothing, what `lookup` finds.

    One source at a time: the predictor has read the text too and drafts repetitions, so that a look-up adds little
    where the predictor saves time. Where it does not, because its drafts are rejected or because passes over many
    sequences take long, a look-up still costs nothing.

    The predictor's keys and values lie in the pages beside the model's, and are found again with them. They decide how
    good drafts are, never what is answered, so two inaccuracies are accepted: the key of a page's last token depends on
    the token after the page, which the page's digest does not cover; and tokens that the predictor did not read, while
    drafting paused or in the last step of an answer, have the key of an earlier use of the page, or zeros. For a
    sequence with more than a few of those it drafts nothing (`PredictorCoverage`): such drafts would be worse than
    the predictor is, and drafting would pause because of them.
    """

    def __init__(
        self,
        runner: DraftingRunner,
        policy: Policy,
        lookup: Drafter,
        page_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.policy = policy
        self.lookup = lookup
        self.clock = clock
        self.draft_inputs: list[DraftInput] = []  # of the last step
        self._coverage = PredictorCoverage(page_size)
        self._is_read: list[bool] = []  # by chunk of the step under way
        self._drafted: WeakKeyDictionary[Sequence, _Draft] = WeakKeyDictionary()
        self._num_proposed = 0
        self._num_accepted = 0
        self._num_drafts: int | None = None  # after the step under way
        self._only_decodes = False
        self._began_s = 0.0

    @property
    def num_proposed(self) -> int:
        return self._num_proposed + self.lookup.num_proposed

    @property
    def num_accepted(self) -> int:
        return self._num_accepted + self.lookup.num_accepted

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        draft = self._draft_of(sequence)
        return self.lookup.propose(sequence, max_drafts) if draft is None else draft.token_ids[:max_drafts]

    def record(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        if self._draft_of(sequence) is None:
            self.lookup.record(sequence, num_proposed, num_accepted)
            return
        del self._drafted[sequence]
        self._num_proposed += num_proposed
        self._num_accepted += num_accepted
        self.policy.record(num_proposed, num_accepted)

    def begin(self, step: Step) -> None:
        """Before a step is run: decides whether it is read, and how much is drafted after it."""
        self._is_read = [self._coverage.begin(chunk) for chunk in step.chunks]
        num_sequences = sum(chunk.num_sampled > 0 for chunk in step.chunks)
        num_read = sum(chunk.num_sampled > 0 for chunk in compress(step.chunks, self._is_read))
        self._num_drafts = self.policy.choose(max(1, num_sequences), num_read)
        if self._num_drafts is None:
            # Prompts are read all the same, which costs little: only their keys are computed. Else prompts that share a
            # prefix, such as a long system prompt, would have no drafts as long as it is cached.
            for index, chunk in enumerate(step.chunks):
                self._is_read[index] &= chunk.start < chunk.sequence.num_prompt_tokens
        self.runner.keeps_hidden = any(self._is_read)
        # The time of others depends on their prompts and pictures.
        self._only_decodes = all(chunk.num_sampled == chunk.num_tokens for chunk in step.chunks)
        self._began_s = self.clock()

    def draft(self, step: Step, find_room: Callable[[Sequence, int], int]) -> None:
        """After a step was updated: the predictor reads its tokens, and drafts for the sequences that continue.

        `find_room` gives how many drafts a sequence has room for, of the number wanted.
        """
        now_s = self.clock()
        if self._only_decodes:
            self.policy.time_step(step.num_tokens, now_s - self._began_s)
        self.draft_inputs = []
        first_row = 0
        for chunk, is_read in zip(step.chunks, self._is_read, strict=True):
            sequence, stop = chunk.sequence, chunk.sequence.num_computed_tokens
            if is_read and sequence.status is Status.RUNNING and self._coverage.end(sequence, chunk.start, stop):
                wanted = find_room(sequence, self._num_drafts) if self._num_drafts and sequence.is_decoding else 0
                following = sequence.token_ids[chunk.start + 1 : stop + 1]
                self.draft_inputs.append(DraftInput(sequence, chunk.start, stop, following, first_row, wanted))
            first_row += chunk.num_tokens
        if not self.draft_inputs:
            return
        for item, token_ids in zip(self.draft_inputs, self.runner.draft(self.draft_inputs), strict=True):
            self._coverage.add(item.sequence, item.start, item.stop)
            unused = self._drafted.pop(item.sequence, None)
            if unused is not None:  # a grammar did not allow them, or forced others: as good as rejected
                self.policy.record(len(unused.token_ids), 0)
            if token_ids:
                self._drafted[item.sequence] = _Draft(item.sequence.num_tokens, token_ids)
        num_passes = max(item.num_drafts for item in self.draft_inputs)
        if self._only_decodes and num_passes:
            self.policy.time_pass(len(self.draft_inputs), (self.clock() - now_s) / num_passes)

    def _draft_of(self, sequence: Sequence) -> _Draft | None:
        """What was drafted for a sequence as it is now."""
        draft = self._drafted.get(sequence)
        return draft if draft is not None and draft.num_tokens == sequence.num_tokens else None
