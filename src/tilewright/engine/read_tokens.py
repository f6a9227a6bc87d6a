"""Which tokens of a sequence a multi-token predictor has read, by the pages that hold its keys."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tilewright.engine.sequence import Sequence
from tilewright.engine.step import Chunk

# One token in 16 may have been missed, and 32 in all: the last step of the answer before in a conversation, or a few
# steps that had too many sequences for drafts. The shortest pause is twice as long: after one nothing goes on as it was.
MAX_MISSED_SHARE = 1 / 16
MAX_MISSED_TOKENS = 32


@dataclass
class _Count:
    start: int  # of the sequence's latest chunk
    num_read: int  # of the tokens before it, and of its own once they are read


class ReadTokens:
    """Counts, by page, the tokens that were read, so that a page found in the prefix cache tells whether it was.

    A sequence that missed too much is not read any further until it is computed anew: keys that are not there make
    drafts poor, and what follows would cost passes for nothing.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._num_by_page: defaultdict[int, int] = defaultdict(int)
        self._counts: WeakKeyDictionary[Sequence, _Count] = WeakKeyDictionary()

    def begin(self, chunk: Chunk) -> bool:
        """Whether enough was read of what is before a chunk that is about to be computed.

        The pages that it begins have nothing of their last use any more.
        """
        sequence, start, size = chunk.sequence, chunk.start, self.page_size
        for page in sequence.pages[-(-start // size) : -(-chunk.stop // size)]:
            self._num_by_page[page] = 0
        count = self._counts.get(sequence)
        if count is None or start <= count.start or start // size != count.start // size:
            # It was sent back to wait, or has filled a page, for which the prefix cache may have given it another's.
            pages = sequence.pages[: -(-start // size)]
            count = self._counts[sequence] = _Count(start, min(start, sum(self._num_by_page[page] for page in pages)))
        count.start = start
        return start - count.num_read <= min(MAX_MISSED_SHARE * start, MAX_MISSED_TOKENS)

    def add(self, sequence: Sequence, start: int, stop: int) -> None:
        """Counts tokens start .. stop of the chunk that was begun as read."""
        size = self.page_size
        for index in range(start // size, -(-stop // size)):
            page = sequence.pages[index]
            num_new = min(stop, (index + 1) * size) - max(start, index * size)
            self._num_by_page[page] = min(size, self._num_by_page[page] + num_new)
        self._counts[sequence].num_read += stop - start
