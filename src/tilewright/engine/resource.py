"""One kind of memory that running sequences hold: the interface through which the scheduler hands it out."""

from __future__ import annotations

import sys
from typing import Any

from tilewright.engine.sequence import Sequence
from tilewright.engine.step import Chunk, Step


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
