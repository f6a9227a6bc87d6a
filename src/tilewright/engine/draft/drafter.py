"""Drafts tokens by prompt look-up: the tokens that followed an earlier occurrence of the last few."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Items
from itertools import takewhile
from typing import Protocol
from weakref import WeakKeyDictionary

from tilewright.engine.schedule.sequence import Sequence


class Drafter(Protocol):
    """Drafts tokens that may follow sequences, and counts the accepted ones."""

    @property
    def num_proposed(self) -> int: ...

    @property
    def num_accepted(self) -> int: ...

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Return up to max_drafts tokens that may follow the sequence, each of which the model can generate."""

    def record(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Record how many drafts of a step were accepted, before the sequence gets its new tokens."""


def num_accepted_drafts(drafts: Items[int], drawn: Items[int]) -> int:
    """Return how many drafts, from the first on, equal the tokens drawn in their places.

    Row i of a step was computed after drafts 0 .. i - 1 and drawn with the random number of its own position, so the
    drawn tokens up to and including the first rejected draft's are exactly those that single steps would have drawn.
    """
    for index, draft in enumerate(drafts):
        if draft != drawn[index]:
            return index
    return len(drafts)


LONGEST_NGRAM = 4
SHORTEST_NGRAM = 2

# A quarter of every 16 drafts must be accepted: a further row costs a few per cent of a step that reads all weights, an
# accepted draft saves a step. Otherwise the sequence drafts nothing for 32 tokens, and for twice as many after each
# further failure.
TRIAL_DRAFTS = 16
MIN_ACCEPTANCE = 0.25
FIRST_PAUSE_TOKENS = 32


class _History:
    """The n-grams of one sequence, and the acceptance of its drafts."""

    def __init__(self) -> None:
        self.next_by_ngram: dict[tuple[int, ...], int] = {}  # index of the token after its latest occurrence
        self.num_indexed = 0  # tokens before this index end an indexed n-gram
        self.num_proposed = 0  # in the current trial
        self.num_accepted = 0
        self.pause_tokens = FIRST_PAUSE_TOKENS
        self.resume_at = 0  # number of tokens of the sequence at which it drafts again


class PromptLookupDrafter:
    """Proposes up to num_drafts tokens for a sequence, and counts the accepted ones.

    Drafts end before tokens from vocabulary_size on, which are read but never generated (Llama-3.2-Vision's image
    token).
    """

    def __init__(self, num_drafts: int = 4, vocabulary_size: int = sys.maxsize) -> None:
        if num_drafts < 1:
            raise ValueError(f"num_drafts is {num_drafts}, expected at least 1")
        self.num_drafts = num_drafts
        self.vocabulary_size = vocabulary_size
        self.num_proposed = 0
        self.num_accepted = 0
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Return the tokens after the latest occurrence of the longest n-gram that ends the sequence, or none."""
        history = self._histories.setdefault(sequence, _History())
        if sequence.num_tokens < history.resume_at:
            return []
        token_ids = sequence.token_ids
        _index(history, token_ids)
        for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            source = history.next_by_ngram.get(tuple(token_ids[-length:]))
            if source is not None:
                count = min(self.num_drafts, max_drafts)
                drafts = token_ids[source : source + count]
                period = len(token_ids) - source
                while len(drafts) < count:  # the match ends the sequence: the drafts continue the repetition
                    drafts.append(drafts[-period])
                return list(takewhile(lambda token_id: token_id < self.vocabulary_size, drafts))
        return []

    def record(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Count the drafts of a step; pause a sequence whose drafts are mostly rejected."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        history = self._histories[sequence]
        history.num_proposed += num_proposed
        history.num_accepted += num_accepted
        if history.num_proposed < TRIAL_DRAFTS:
            return
        if history.num_accepted < MIN_ACCEPTANCE * history.num_proposed:
            history.resume_at = sequence.num_tokens + history.pause_tokens
            history.pause_tokens *= 2
        else:
            history.pause_tokens = FIRST_PAUSE_TOKENS
        history.num_proposed = history.num_accepted = 0


def _index(history: _History, token_ids: list[int]) -> None:
    """Index the n-grams that end before the last token: nothing follows the last one yet."""
    for end in range(max(history.num_indexed, SHORTEST_NGRAM), len(token_ids)):
        for length in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
            history.next_by_ngram[tuple(token_ids[end - length : end])] = end
    history.num_indexed = max(history.num_indexed, len(token_ids))
