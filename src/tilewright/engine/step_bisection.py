"""A step that raised, computed again in parts: a sequence that raises alone has failed, the others continue."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from tilewright.engine.scheduler import Scheduler
from tilewright.engine.step import Chunk, Sampled, Step
from tilewright.types import Medium

Failure = tuple[Chunk, Exception]


@dataclass(frozen=True)
class StepBisector:
    """Finds the sequences because of which a step cannot be computed.

    Keys and values are written again as they were. Recurrent states are not: a step that raised may have written half
    of them over those that it read. There the parts only show which sequences fail, and the others are preempted and
    computed again from what is cached of them; where no sequence fails alone, all fail.
    """

    compute: Callable[[Step], list[Sampled]]
    encode: Callable[[list[Medium]], None]
    scheduler: Scheduler

    def rescue(self, step: Step, error: Exception) -> tuple[Step, list[Sampled]]:
        """What is left of a step after it raised an error, and its results; the scheduler has the failures."""
        if self._drop_unencodable(step.encode):  # nothing was written before that
            rest = self._part(step, [chunk for chunk in step.chunks if not chunk.sequence.is_finished])
            try:
                return rest, self.compute(rest)
            except Exception as later:
                return self.rescue(rest, later)
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
        """The chunks by halves, and those that raise by halves again: one of n is found in some 2 log2(n) passes."""
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
        """Some chunks of a step whose media are encoded, with the groups they see, unless those are filled by now."""
        seen = {group.key for chunk in chunks for group in chunk.sequence.pinned_groups}
        is_filled = self.scheduler.resources.media.cross_cache.is_filled
        groups = [group for group in step.cross_groups if group.key in seen and not is_filled(group.key)]
        return replace(step, chunks=chunks, encode=[], cross_groups=groups)

    def _drop_unencodable(self, media: Items[Medium]) -> bool:
        """Whether one of the media cannot be encoded by itself: those that need it have failed."""
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
