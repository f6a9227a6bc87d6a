"""Which tokens of a sequence a multi-token predictor has read, by the pages that hold its keys."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tilewright.engine.sequence import Sequence
from tilewright.engine.step import Chunk

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
