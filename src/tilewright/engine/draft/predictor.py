"""Drafts by the checkpoint's multi-token predictor, which reads the hidden states of each step.

A sequence's pages record which of its tokens it has read.
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

# The predictor may have missed one token in 16, at most 32: the last step of the previous answer in a conversation, or
# a few steps with too many sequences for drafts. The shortest pause is longer than that: after it no sequence is read
# any further.
MAX_MISSED_SHARE = 1 / 16
MAX_MISSED_TOKENS = 32


@dataclass
class _Count:
    start: int  # start of the sequence's latest chunk
    num_read: int  # how many tokens before it were read, and of its own once they are read


class PredictorCoverage:
    """Records which tokens of each page the predictor has read, so that it is known for cached pages too.

    A sequence with too many unread tokens is not read any further until it is admitted again: missing keys make drafts
    poor, and further passes would be wasted.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._read_by_page: defaultdict[int, int] = defaultdict(int)  # bit i: token i of the page was read
        self._counts: WeakKeyDictionary[Sequence, _Count] = WeakKeyDictionary()

    def begin(self, chunk: Chunk) -> bool:
        """Return whether enough tokens before a chunk that is about to be computed were read.

        The pages that the chunk begins lose the bits of their earlier use.
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
        """Return whether enough was read, once tokens start .. stop of the chunk are computed and about to be read.

        A page that they filled may have been replaced by an equal page of the prefix cache.
        """
        if start // self.page_size != stop // self.page_size:
            self._count(sequence, start)
        return self._is_enough(sequence)

    def add(self, sequence: Sequence, start: int, stop: int) -> None:
        """Record that tokens start .. stop of the chunk passed to `begin` were read."""
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
    """Chooses the number of drafts from their acceptance and their time (engine/draft/policy.py)."""

    def choose(self, num_sequences: int, num_read: int) -> int | None: ...

    def record(self, num_proposed: int, num_right: int) -> None: ...

    def time_step(self, num_rows: int, took_s: float) -> None: ...

    def time_pass(self, num_sequences: int, took_s: float) -> None: ...


class DraftingRunner(Protocol):
    """Computes drafts from the hidden states of the last step (engine/run/executor.py)."""

    def draft(self, draft_inputs: list[DraftInput]) -> list[list[int]]: ...


@dataclass(frozen=True)
class DraftPlan:
    """Which chunks of a step the predictor reads after it, and how many tokens it drafts then."""

    is_read: list[bool]  # by chunk
    num_drafts: int | None  # None: drafting pauses
    only_decodes: bool  # the time of other steps depends on their prompts and images
    began_s: float

    @property
    def keeps_hidden(self) -> bool:
        """Whether the predictor needs the hidden states of the step's tokens."""
        return any(self.is_read)


@dataclass(frozen=True)
class _Draft:
    """Tokens drafted for a sequence when it had `num_tokens` tokens."""

    num_tokens: int
    token_ids: list[int]


class PredictorDrafter:
    """Proposes the predictor's drafts after the last step; without any, those of `lookup`.

    One source at a time: the predictor has read the text too and drafts repetitions, so that a look-up adds little
    where the predictor saves time. Where it does not, because its drafts are rejected or because passes over many
    sequences take long, a look-up still costs nothing.

    The predictor's keys and values lie in the pages beside the model's and are cached with them. They decide how good
    drafts are, never what is answered, so two inaccuracies are accepted: the key of a page's last token depends on the
    token after the page, which the page's digest does not cover; and tokens that the predictor did not read, while
    drafting paused or in the last step of an answer, have the key of an earlier use of the page, or zeros. A sequence
    with more than a few of those gets no drafts (`PredictorCoverage`): bad drafts would make drafting pause.
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
        self._coverage = PredictorCoverage(page_size)
        self._drafted: WeakKeyDictionary[Sequence, _Draft] = WeakKeyDictionary()
        self._num_proposed = 0
        self._num_accepted = 0

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

    def plan(self, step: Step) -> DraftPlan:
        """Decide, before a step runs, which chunks the predictor reads and how many tokens it drafts after them."""
        is_read = [self._coverage.begin(chunk) for chunk in step.chunks]
        num_sequences = sum(chunk.num_sampled > 0 for chunk in step.chunks)
        num_read = sum(chunk.num_sampled > 0 for chunk in compress(step.chunks, is_read))
        num_drafts = self.policy.choose(max(1, num_sequences), num_read)
        if num_drafts is None:
            # Prompts are read all the same, which costs little: only their keys are computed. Otherwise prompts that
            # share a cached prefix, such as a long system prompt, would never have drafts.
            for index, chunk in enumerate(step.chunks):
                is_read[index] &= chunk.start < chunk.sequence.num_prompt_tokens
        # The time of other steps depends on their prompts and images.
        only_decodes = all(chunk.num_sampled == chunk.num_tokens for chunk in step.chunks)
        return DraftPlan(is_read, num_drafts, only_decodes, began_s=self.clock())

    def draft(self, step: Step, plan: DraftPlan, find_room: Callable[[Sequence, int], int]) -> list[DraftInput]:
        """Let the predictor read an updated step's tokens, draft for the sequences that continue; return what it read.

        `find_room(sequence, wanted)` returns how many drafts the sequence has room for.
        """
        now_s = self.clock()
        if plan.only_decodes:
            self.policy.time_step(step.num_tokens, now_s - plan.began_s)
        draft_inputs: list[DraftInput] = []
        first_row = 0
        for chunk, is_read in zip(step.chunks, plan.is_read, strict=True):
            sequence, stop = chunk.sequence, chunk.sequence.num_computed_tokens
            if is_read and sequence.status is Status.RUNNING and self._coverage.end(sequence, chunk.start, stop):
                wanted = find_room(sequence, plan.num_drafts) if plan.num_drafts and sequence.is_decoding else 0
                following = sequence.token_ids[chunk.start + 1 : stop + 1]
                draft_inputs.append(DraftInput(sequence, chunk.start, stop, following, first_row, wanted))
            first_row += chunk.num_tokens
        if not draft_inputs:
            return []
        for item, token_ids in zip(draft_inputs, self.runner.draft(draft_inputs), strict=True):
            self._coverage.add(item.sequence, item.start, item.stop)
            unused = self._drafted.pop(item.sequence, None)
            if unused is not None:  # a grammar rejected them or forced other tokens
                self.policy.record(len(unused.token_ids), 0)
            if token_ids:
                self._drafted[item.sequence] = _Draft(item.sequence.num_tokens, token_ids)
        num_passes = max(item.num_drafts for item in draft_inputs)
        if plan.only_decodes and num_passes:
            self.policy.time_pass(len(draft_inputs), (self.clock() - now_s) / num_passes)
        return draft_inputs

    def _draft_of(self, sequence: Sequence) -> _Draft | None:
        """Return the draft for a sequence, None if it has changed since."""
        draft = self._drafted.get(sequence)
        return draft if draft is not None and draft.num_tokens == sequence.num_tokens else None
