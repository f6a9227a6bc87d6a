"""Finds requests by custom_id, in files of millions: digests in arrays, 24 bytes each."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np


class IdIndex:
    """Numbers ids in the order they are added, then finds them by a digest of 128 bits, which no two ids share."""

    def __init__(self) -> None:
        self._added = array("Q")
        self._halves = np.empty((0, 2), np.uint64)  # sorted
        self._order = np.empty(0, np.int64)  # the number of each sorted digest

    def add(self, custom_id: str) -> None:
        self._added.extend(_digest(custom_id))

    def sort(self) -> tuple[int, int] | None:
        """Prepares `find`; returns the numbers of two equal ids, if there are any."""
        halves = np.frombuffer(self._added, np.uint64).reshape(-1, 2)
        self._order = np.lexsort((halves[:, 1], halves[:, 0]))
        self._halves = halves[self._order]
        del halves
        self._added = array("Q")
        is_equal = (self._halves[1:] == self._halves[:-1]).all(axis=1)
        if not is_equal.any():
            return None
        first = int(is_equal.argmax())
        return int(self._order[first]), int(self._order[first + 1])

    def find(self, custom_id: str) -> int | None:
        """The number of an id."""
        high, low = (np.uint64(half) for half in _digest(custom_id))
        place = int(np.searchsorted(self._halves[:, 0], high))
        while place < len(self._halves) and self._halves[place, 0] == high:
            if self._halves[place, 1] == low:
                return int(self._order[place])
            place += 1
        return None


def _digest(custom_id: str) -> tuple[int, int]:
    # JSON can hold a lone surrogate, UTF-8 cannot.
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
