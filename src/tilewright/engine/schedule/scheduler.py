"""Chooses the tokens to compute in the next step."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterable, Iterator

from tilewright.engine.draft.drafter import Drafter
from tilewright.engine.schedule.resources import SequenceResources
from tilewright.engine.schedule.sequence import Sequence, Status
from tilewright.engine.schedule.step import NO_TOKEN, Chunk, Sampled, SequenceOutput, Step, StepLimits
from tilewright.types import ContextLengthExceeded, FinishReason, Medium, RequestError


class Scheduler:
    """The waiting and the running sequences, both in order of arrival."""

    def __init__(self, resources: SequenceResources, limits: StepLimits, drafter: Drafter | None = None) -> None:
        self.resources = resources
        self.limits = limits
        self.drafter = drafter
        self.max_context = min(limits.max_context, resources.kv.pool.num_tokens)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._failures: dict[str, Exception] = {}  # by request: the error that ended one of its sequences in this step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, num_prompt_tokens: int) -> None:
        """Raise RequestError for a prompt that could never be answered."""
        if num_prompt_tokens < 1:
            raise RequestError("the prompt has no tokens, expected at least 1")
        if num_prompt_tokens >= self.max_context:
            has_memory = self.max_context == self.limits.max_context
            memory = "" if has_memory else f", and the memory for keys and values holds {self.max_context} (kv_memory)"
            raise ContextLengthExceeded(
                self.max_context,
                f"your prompt resulted in {num_prompt_tokens} tokens, the answer needs at least one{memory}",
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of a request; RequestError if they could never be answered."""
        for sequence in sequences:
            self.check(sequence.num_prompt_tokens)
            self.resources.check(sequence)
            bisect.insort(self.waiting, sequence, key=_arrival)

    def abort(self, request_id: str) -> list[Sequence]:
        """End the unfinished sequences of a request, and return them. Not while a step is under way."""
        dropped = [item for item in self.running + self.waiting if item.request_id == request_id]
        for sequence in dropped:
            self.finish(sequence, "abort")
        return dropped

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and release what it holds."""
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        self._release(sequence)
        sequence.matcher = None
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.finished_s = time.perf_counter()

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence that failed; others of its request continue until the step is done."""
        self._failures.setdefault(sequence.request_id, error)
        if not sequence.is_finished:
            self.finish(sequence, "abort")

    def pop_failures(self) -> dict[str, Exception]:
        """Return the errors of sequences that failed since the last call, by request."""
        failures, self._failures = self._failures, {}
        return failures

    def media_ahead(self, step: Step) -> list[Medium]:
        """Return media that the next step is likely to encode."""
        return self.resources.media.ahead(step, itertools.chain(self.running, self.waiting))

    def readers(self, media: Iterable[Medium]) -> list[Sequence]:
        """Return the running sequences that media are encoded for."""
        return self.resources.media.readers(media, self.running)

    def rewind(self, step: Step) -> None:
        """Preempt the running sequences of a failed step, so that they are computed again from what is cached."""
        for chunk in step.chunks:
            if chunk.sequence.status is Status.RUNNING:
                self._preempt(chunk.sequence)

    def schedule(self) -> Step:
        """Return the next step: a token of every decoding sequence, then prompts; empty only without work.

        It may have media to encode and no chunks, if adjacent images are encoded over several steps.
        """
        while True:
            step = Step()
            self._schedule_decodes(step)
            self._schedule_prompts(step)
            if step.chunks or step.encode or not self.running:
                return step
            self._preempt(self.running[-1])  # prompts hold all pages, and none of them can continue

    def update(self, step: Step, sampled: list[Sampled]) -> list[SequenceOutput]:
        """Append the sampled tokens; return what each sequence gained, and why it ended if it did."""
        outputs = []
        for chunk, result in zip(step.chunks, sampled, strict=True):
            try:
                output = self._append(chunk, result)
            except Exception as error:
                self.fail(chunk.sequence, error)
                continue
            if output is not None:
                outputs.append(output)
        return outputs

    def _append(self, chunk: Chunk, result: Sampled) -> SequenceOutput | None:
        """Append a chunk's tokens and return them as output; None in the middle of a prompt. May end the sequence."""
        sequence, matcher = chunk.sequence, chunk.sequence.matcher
        if matcher is not None:
            matcher.raise_error()  # its mask was invalid
        if result.prompt_logprobs:
            sequence.prompt_logprobs.extend(result.prompt_logprobs)
        num_accepted = len(result.token_ids) - 1 if result.token_ids else 0
        if self.drafter and chunk.num_drafts and not chunk.is_forced:
            self.drafter.record(sequence, chunk.num_drafts, num_accepted)
        num_before, reason = sequence.num_tokens, None
        for token_id in result.token_ids:
            if token_id == NO_TOKEN:  # (the row after a draft that ends the grammar is never reached)
                raise FloatingPointError(f"the model's logits of token {sequence.num_tokens} are not numbers (NaN)")
            sequence.token_ids.append(token_id)
            reason = self._finish_reason(sequence)
            if reason:
                break
        if matcher is not None:
            matcher.raise_error()
        # Later tokens overwrite the slots of rejected drafts.
        num_computed = chunk.stop - chunk.num_drafts + num_accepted
        sequence.num_computed_tokens = min(num_computed, sequence.num_tokens)
        self.resources.commit(sequence)
        if not result.token_ids:
            return None
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter()
        num_new = sequence.num_tokens - num_before
        sequence.logprobs.extend(result.logprobs[:num_new])
        has_stop_token = reason == "stop" and not (matcher is not None and matcher.is_complete)
        if reason:
            self.finish(sequence, reason)
        return SequenceOutput(sequence, result.token_ids[:num_new], result.logprobs[:num_new], reason, has_stop_token)

    def find_room(self, sequence: Sequence, num_drafts: int) -> int:
        """Reserve pages for drafts of a decoding sequence, and return how many of num_drafts fit."""
        num_drafts = min(num_drafts, self._max_drafts(sequence))
        # Each draft but the first comes from a pass that writes the key of the previous draft.
        while num_drafts > 1 and not self.resources.reserve(sequence, sequence.num_tokens + num_drafts - 2):
            num_drafts -= 1
        return num_drafts

    def _max_drafts(self, sequence: Sequence) -> int:
        # The last row gives a token too, so there is one draft fewer than tokens.
        return max(0, min(self._num_tokens_left(sequence) - 1, self.resources.draft_room()))

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        token_id, matcher = sequence.token_ids[-1], sequence.matcher
        if token_id in sequence.stop_token_ids:
            # In a constrained answer it ends the answer only where the grammar accepts, else it is a token like any
            # other; before min_tokens it comes only if the grammar allows nothing else.
            is_end = sequence.num_output_tokens >= sequence.params.min_tokens
            if is_end if matcher is None else matcher.is_accepting:
                return "stop"
        if matcher is not None:
            matcher.advance(token_id)
            if matcher.is_complete:
                return "stop"
        if self._num_tokens_left(sequence) <= 0:
            return "length"
        return None

    def _num_tokens_left(self, sequence: Sequence) -> int:
        """Return how many tokens the answer may still gain."""
        in_context = self.max_context - sequence.num_tokens
        max_tokens = sequence.params.max_tokens
        return in_context if max_tokens is None else min(in_context, max_tokens - sequence.num_output_tokens)

    def _schedule_decodes(self, step: Step) -> None:
        decoding = self.resources.ready([sequence for sequence in self.running if sequence.is_decoding])
        num_spare_rows = min(self.limits.max_draft_rows - len(decoding), self.resources.max_drafts_per_step)
        for sequence in decoding:
            try:
                num_spare_rows -= self._schedule_decode(step, sequence, num_spare_rows)
            except Exception as error:
                self.fail(sequence, error)

    def _schedule_decode(self, step: Step, sequence: Sequence, max_drafts: int) -> int:
        """Add the next token of a sequence to the step, if it has a page, with drafts; return the number of drafts."""
        # An earlier sequence may have taken its pages. The one preempted here arrived after all in the step.
        while sequence.status is Status.RUNNING and not self.resources.reserve(sequence, sequence.num_tokens):
            self._preempt(self.running[-1])
        if sequence.status is not Status.RUNNING:
            return 0
        drafts, is_forced = self._draft(sequence, max_drafts)
        self._put(step, Chunk(sequence, sequence.num_computed_tokens, 1 + len(drafts), drafts, is_forced))
        return len(drafts)

    def _draft(self, sequence: Sequence, max_drafts: int) -> tuple[list[int], bool]:
        """Return drafts for a sequence, and whether its grammar forces them, so that all are accepted."""
        max_drafts = min(max_drafts, self._max_drafts(sequence)) if max_drafts > 0 else 0
        drafts: list[int] = []
        is_forced = False
        if max_drafts > 0:
            matcher = sequence.matcher
            if matcher is not None:
                drafts = matcher.forced_token_ids()[:max_drafts]
                is_forced = bool(drafts)
            if not drafts and self.drafter:
                drafts = self.drafter.propose(sequence, max_drafts)
                if matcher is not None:
                    del drafts[matcher.num_fitting(drafts) :]
        while drafts and not self.resources.reserve(sequence, sequence.num_tokens + len(drafts)):
            drafts.pop()  # drafts preempt no other sequence
        return drafts, is_forced

    def _put(self, step: Step, chunk: Chunk) -> None:
        self.resources.plan(chunk)
        step.chunks.append(chunk)  # last: a sequence that raised above is not in the step

    def _schedule_prompts(self, step: Step) -> None:
        budget = prompt_budget = self.limits.max_tokens_per_step - step.num_tokens
        self._may_admit = True
        self.resources.begin_step()
        for sequence, share in self._prompt_shares(step, budget):
            share = min(share, budget)
            if budget <= 0:
                break
            if share <= 0:
                continue
            try:
                budget -= self._schedule_prompt(step, sequence, share, prompt_budget)
            except Exception as error:
                self.fail(sequence, error)

    def _schedule_prompt(self, step: Step, sequence: Sequence, share: int, prompt_budget: int) -> int:
        """Add a chunk of a prompt to the step, of at most `share` tokens, and return its number of tokens."""
        if sequence.status is Status.WAITING and not self._admit(sequence):
            return 0
        start = sequence.num_computed_tokens
        stop = min(sequence.num_tokens, start + share, self._prompt_row_end(sequence))
        stop = self.resources.chunk_end(step, sequence, start, stop, prompt_budget)
        if stop <= start or not self.resources.reserve(sequence, stop):
            return 0
        self._put(step, Chunk(sequence, start, stop - start))
        return stop - start

    def _prompt_shares(self, step: Step, budget: int) -> Iterator[tuple[Sequence, int]]:
        """Yield the sequences with a prompt to compute, in order, and the budget that each may use.

        By arrival, with one exception: while the oldest prompt is computed, half of the budget is set aside for later
        ones that are at most half as long as the rest of it. So a short prompt waits for other short ones, but not for
        a long one, which in turn keeps at least half of its speed.
        """
        decoding = {chunk.sequence for chunk in step.chunks}
        prompts = [sequence for sequence in self.running if sequence not in decoding]
        if budget > 0 and len(self.running) < self.limits.max_sequences:
            prompts = sorted(prompts + [item for item in self.waiting if not item.waits_for_leader], key=_arrival)
        if not prompts:
            return
        oldest, others = prompts[0], prompts[1:]
        is_short = [2 * item.num_uncomputed_tokens <= oldest.num_uncomputed_tokens for item in others]
        short = list(itertools.compress(others, is_short))
        set_aside = min(budget // 2, sum(item.num_uncomputed_tokens for item in short))
        yield oldest, budget - set_aside
        for sequence in short:
            yield sequence, set_aside
            set_aside -= sequence.num_uncomputed_tokens
        for sequence in itertools.compress(others, (not item for item in is_short)):
            yield sequence, budget

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence, if there is memory for it beside the needs of others; return whether it runs.

        If one must wait, all after it wait too: otherwise a stream of short ones would starve it.
        """
        if not self._may_admit or len(self.running) >= self.limits.max_sequences:
            return False
        num_cached = self.resources.admit(sequence)
        if num_cached is None:
            self._may_admit = False
            return False
        if sequence.started_s is None:
            sequence.started_s = time.perf_counter()
            sequence.num_cached_tokens = num_cached
        sequence.num_computed_tokens = num_cached
        sequence.status = Status.RUNNING
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_arrival)
        return True

    def _prompt_row_end(self, sequence: Sequence) -> int:
        if not sequence.needs_prompt_logprobs:
            return sequence.num_tokens
        first_row = max(sequence.num_computed_tokens, len(sequence.prompt_logprobs) - 1)
        return first_row + self.limits.max_prompt_rows

    def _preempt(self, sequence: Sequence) -> None:
        """Move a sequence back to the queue, at its place by arrival; it resumes with all its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_arrival)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.resources.release(sequence)
        sequence.num_computed_tokens = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.id
