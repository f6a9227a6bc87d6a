"""What the vision encoder made of pictures and videos, kept by content."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class EncoderCache:
    """Features [num_features, width] by Medium.key, at most max_bytes of them, least recently used dropped first.

    What a running sequence still reads is pinned and never dropped; if that alone exceeds max_bytes, the cache is over
    its bound until it has been read.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.num_lookups = 0
        self.num_hits = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._pins: Counter[bytes] = Counter()

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_lookups)

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Tensor:
        """The features; KeyError if they are not stored."""
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: bytes, features: Tensor) -> None:
        """Stores features, and drops others to make room."""
        if key in self._entries:
            self.size_bytes -= self._entries.pop(key).nbytes
        self._entries[key] = features
        self.size_bytes += features.nbytes
        self._shrink()

    def pin(self, key: bytes) -> None:
        """Keeps an entry until `unpin`, also one that is only about to be put. Counts a hit if it need not be made."""
        self.num_lookups += 1
        self.num_hits += key in self._entries or key in self._pins
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]
            self._shrink()

    def clear(self) -> None:
        """Drops everything that is not pinned."""
        for key in [key for key in self._entries if key not in self._pins]:
            self.size_bytes -= self._entries.pop(key).nbytes

    def _shrink(self) -> None:
        if self.size_bytes <= self.max_bytes:
            return
        for key in [key for key in self._entries if key not in self._pins]:
            self.size_bytes -= self._entries.pop(key).nbytes
            if self.size_bytes <= self.max_bytes:
                return
