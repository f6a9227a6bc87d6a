"""Runs the scheduler's steps as plain data on every rank; computes a step that raised again in parts.

A sequence that raises alone fails, the others continue.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from tilewright.engine.ranks.ranks import EngineRanks, RankCommand
from tilewright.engine.run.runner import ModelRunner
from tilewright.engine.run.writer import DraftWriter, StepWriter
from tilewright.engine.schedule.scheduler import Scheduler
from tilewright.engine.schedule.step import Chunk, DraftInput, Sampled, Step
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.layers.batch import WantedStates
from tilewright.models.protocol import MediaItem
from tilewright.types import Medium, Region

Result = TypeVar("Result")


class Executor:
    """Writes each step where runners read it, and records in the caches what they have computed.

    Every rank's runner computes its part of the model; the logits on this rank are complete.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        writer: StepWriter,
        media_buffer: MediaBuffer | None = None,
        ranks: EngineRanks | None = None,
    ) -> None:
        self.model_runner = model_runner
        self.media_buffer = media_buffer
        self._ranks = ranks
        self.writer = writer
        self.features, self.cross_cache = writer.features, writer.cross_cache
        draft_inputs = model_runner.draft_inputs
        self._draft_writer = None if draft_inputs is None else DraftWriter(draft_inputs, self.features)
        self._is_copied = not model_runner.device.is_host  # whether a step's inputs are copied to another device
        self._ahead: dict[bytes, Region] = {}  # media sent ahead of the step that encodes them

    def run(self, step: Step) -> Tensor:
        """Run a step and return its logits in order, fp32 [R, V]. The next step overwrites them."""
        return self._run(step, self.model_runner.run)

    def run_with_states(self, step: Step, wanted: WantedStates) -> tuple[Tensor, Tensor]:
        """Run a step and return its logits as `run` does, and the hidden states that are wanted [M, D]."""
        return self._run(step, lambda: self.model_runner.run_with_states(wanted))

    def _run(self, step: Step, compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`, this rank's part of a step that all ranks compute."""
        if self._is_copied:
            self.model_runner.recycle()
        are_ahead = False
        if step.encode:
            self._load(step.encode)
            are_ahead = self._pop_ahead(step.encode)
        self.writer.write(step, media_are_ahead=are_ahead)
        try:
            result = self._do(RankCommand.run, compute)
        finally:
            if step.encode:
                self._record_encoded(step.encode)
            if self._is_copied and not step.num_logits:
                # Nobody waits for tokens, which arrive after all copies: an ending request may free its media.
                self.model_runner.recycle()
        for group in step.cross_groups:
            self.cross_cache.fill(group.key)
        return result

    @property
    def sends_ahead(self) -> bool:
        """Return whether media of later steps may be copied while a step is computed."""
        return self._is_copied and self.media_buffer is not None

    def send_ahead(self, media: Items[Medium]) -> None:
        """Start copying media of a later step, unless they were sent already; those not written yet are left out."""
        assert self.media_buffer is not None
        wanted = {medium.key: medium.region for medium in media if self.media_buffer.is_written(medium.region)}
        if wanted and not wanted.items() <= self._ahead.items():
            items = [MediaItem.of(medium) for medium in media if medium.key in wanted]
            self._ahead = wanted if self.model_runner.send_ahead(items) else {}

    def end_ahead(self) -> None:
        """Return when the media sent ahead have arrived, usually before the tokens of the current step.

        After that a request that ends may free its media.
        """
        if self._ahead:
            self.model_runner.recycle()

    def _pop_ahead(self, media: Items[Medium]) -> bool:
        """Return whether all of the media were sent ahead, and clear what was."""
        sent, self._ahead = self._ahead, {}
        return all(sent.get(medium.key) == medium.region for medium in media)

    def encode(self, media: Items[Medium]) -> None:
        """Encode media without computing anything else."""
        self.run(Step(encode=list(media)))

    def draft(self, draft_inputs: Items[DraftInput]) -> list[list[int]]:
        """Return the predictor's drafts after the last step, as many tokens as each input asks for."""
        assert self._draft_writer is not None, "the model has no predictor"
        self._draft_writer.write(draft_inputs)
        return self._do(RankCommand.draft, self.model_runner.draft)

    def _do(self, command: RankCommand, compute: Callable[[], Result]) -> Result:
        return compute() if self._ranks is None else self._ranks.do(command, compute)

    def _load(self, media: Items[Medium]) -> None:
        """Write patches that were left out while the encoder's output was cached, which is evicted now."""
        for medium in media:
            assert self.media_buffer is not None, "a model that takes media has a buffer for them"
            self.media_buffer.load(medium.region)

    def _record_encoded(self, media: Items[Medium]) -> None:
        """Record encoded features, even of a step that failed later: they need not be encoded again."""
        for medium in media:
            features = self.model_runner.features.get(self.features.id_of(medium.key))
            if features is not None:
                self.features.put(medium.key, features.nbytes)


Failure = tuple[Chunk, Exception]


@dataclass(frozen=True)
class StepBisector:
    """Finds the sequences that make a step fail.

    Computing a part again writes the same keys and values. Recurrent states differ: a step that raised may have
    overwritten half of the states it read. There the parts only show which sequences fail, and the others are preempted
    and computed again from what is cached; if no sequence fails alone, all fail.
    """

    compute: Callable[[Step], list[Sampled]]
    encode: Callable[[list[Medium]], None]
    scheduler: Scheduler

    def bisect(self, step: Step, error: Exception) -> tuple[Step, list[Sampled]]:
        """Return the computable part of a step that raised, and its results; the scheduler gets the failures."""
        if self._drop_unencodable(step.encode):  # nothing was computed before that
            rest = self._part(step, [chunk for chunk in step.chunks if not chunk.sequence.is_finished])
            try:
                return rest, self.compute(rest)
            except Exception as later:
                return self.bisect(rest, later)
        computed, sampled, failures = self._compute_apart(step, error)
        is_rewound = not self.scheduler.resources.can_repeat_steps
        if is_rewound and not failures:
            failures = [(chunk, error) for chunk in step.chunks]
        for chunk, failure in failures:
            self.scheduler.fail(chunk.sequence, failure)
        if is_rewound:
            self.scheduler.rewind(step)
            return Step(), []
        return Step(computed), sampled

    def _compute_apart(self, step: Step, error: Exception) -> tuple[list[Chunk], list[Sampled], list[Failure]]:
        """Compute the chunks by halves, and failing halves again: one of n is found in some 2 log2(n) passes."""
        if len(step.chunks) == 1:
            return [], [], [(step.chunks[0], error)]
        computed: list[Chunk] = []
        sampled: list[Sampled] = []
        failures: list[Failure] = []
        pending = _halves(step.chunks)
        while pending:
            chunks = pending.pop()
            try:
                sampled += self.compute(self._part(step, chunks))
                computed += chunks
            except Exception as later:
                if len(chunks) > 1:
                    pending += _halves(chunks)
                else:
                    failures.append((chunks[0], later))
        return computed, sampled, failures

    def _part(self, step: Step, chunks: list[Chunk]) -> Step:
        """Return a step of some chunks whose media are encoded, with their groups that are not filled yet."""
        seen = {group.key for chunk in chunks for group in chunk.sequence.pinned_groups}
        is_filled = self.scheduler.resources.media.cross_cache.is_filled
        groups = [group for group in step.cross_groups if group.key in seen and not is_filled(group.key)]
        return replace(step, chunks=chunks, encode=[], cross_groups=groups)

    def _drop_unencodable(self, media: Items[Medium]) -> bool:
        """Return whether one of the media cannot be encoded even alone; the sequences that need it fail."""
        is_one = False
        for medium in media:
            if self.scheduler.resources.media.features.has(medium.key):
                continue
            try:
                self.encode([medium])
            except Exception as error:
                is_one = True
                for sequence in self.scheduler.readers([medium]):
                    self.scheduler.fail(sequence, error)
        return is_one


def _halves(chunks: list[Chunk]) -> list[list[Chunk]]:
    middle = len(chunks) // 2
    return [half for half in (chunks[middle:], chunks[:middle]) if half]
