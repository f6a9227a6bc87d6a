"""Keeps track of the cached outputs of the encoder, by content; runners hold the features themselves."""

from __future__ import annotations

from collections import Counter, OrderedDict


class EncoderCache:
    """Sizes of features by Medium.key, at most max_bytes in all, the least recently used evicted first.

    Runners keep the features under a small integer id. Features that a running sequence still reads are pinned and
    never evicted; if these alone exceed max_bytes, the cache is over its bound until they are read.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.num_lookups = 0
        self.num_hits = 0
        self._entries: OrderedDict[bytes, int] = OrderedDict()  # bytes of each, least recently used first
        self._pins: Counter[bytes] = Counter()
        self._ids: dict[bytes, int] = {}  # of entries, and of media that are about to be encoded
        self._free_ids: list[int] = []
        self._dropped_ids: list[int] = []  # evicted, not yet reported to runners

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_lookups)

    @property
    def num_dropped(self) -> int:
        """Number of evicted features that runners still hold."""
        return len(self._dropped_ids)

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def id_of(self, key: bytes) -> int:
        """Return the id by which runners know the features, valid until they are evicted."""
        if key in self._entries:
            self._entries.move_to_end(key)
        if key not in self._ids:
            unused = len(self._ids) + len(self._free_ids) + len(self._dropped_ids)
            self._ids[key] = self._free_ids.pop() if self._free_ids else unused
        return self._ids[key]

    def put(self, key: bytes, size_bytes: int) -> None:
        """Record that runners hold the features, and evict others to make room."""
        self.id_of(key)
        self.size_bytes += size_bytes - self._entries.pop(key, 0)
        self._entries[key] = size_bytes
        self._shrink()

    def pop_dropped(self, max_ids: int) -> list[int]:
        """Return up to max_ids ids of evicted features for the next step to report; they may be assigned again."""
        taken, self._dropped_ids = self._dropped_ids[:max_ids], self._dropped_ids[max_ids:]
        self._free_ids += taken
        return taken

    def pin(self, key: bytes) -> None:
        """Keep an entry until `unpin`, even before it is put. Counts a hit if it is there or about to be put."""
        self.num_lookups += 1
        self.num_hits += key in self._entries or key in self._pins
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]
            if key not in self._entries and key in self._ids:  # it could not be encoded
                self._dropped_ids.append(self._ids.pop(key))
            self._shrink()

    def clear(self) -> None:
        """Evict everything that is not pinned."""
        for key in [key for key in self._entries if key not in self._pins]:
            self._evict(key)

    def _shrink(self) -> None:
        if self.size_bytes <= self.max_bytes:
            return
        for key in [key for key in self._entries if key not in self._pins]:
            self._evict(key)
            if self.size_bytes <= self.max_bytes:
                return

    def _evict(self, key: bytes) -> None:
        self.size_bytes -= self._entries.pop(key)
        self._dropped_ids.append(self._ids.pop(key))
