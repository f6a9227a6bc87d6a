"""What drafts tokens for the scheduler, and how many of its drafts are accepted."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from tilewright.engine.sequence import Sequence


class Drafter(Protocol):
    """Drafts tokens that may follow sequences, and counts how many of them are accepted."""

    @property
    def num_proposed(self) -> int: ...

    @property
    def num_accepted(self) -> int: ...

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Up to max_drafts tokens that may follow the sequence, each one that the model can generate."""

    def record(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Learns how many drafts of a step were accepted, before the sequence gets its new tokens."""


def num_accepted_drafts(drafts: Items[int], drawn: Items[int]) -> int:
    """How many drafts equal what was drawn in their place.

    Row i of a step was computed after drafts 0 .. i - 1 and drawn with the random number of its own position, so the
    drawn tokens up to and including the first rejected draft's are exactly those that single steps would have drawn.
    """
    for index, draft in enumerate(drafts):
        if draft != drawn[index]:
            return index
    return len(drafts)
