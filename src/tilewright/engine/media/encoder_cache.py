"""Which outputs of the vision encoder are kept, by content; the features themselves are the runners'."""

from __future__ import annotations

from collections import Counter, OrderedDict


class EncoderCache:
    """Sizes of features by Medium.key, at most max_bytes of them, least recently used evicted first.

    Runners keep the features under a small integer id. What a running sequence still reads is pinned and never evicted;
    if that alone exceeds max_bytes, the cache is over its bound until it has been read.
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
        """Evicted features that runners still have."""
        return len(self._dropped_ids)

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def id_of(self, key: bytes) -> int:
        """What runners know the features by, from now until they are evicted."""
        if key in self._entries:
            self._entries.move_to_end(key)
        if key not in self._ids:
            unused = len(self._ids) + len(self._free_ids) + len(self._dropped_ids)
            self._ids[key] = self._free_ids.pop() if self._free_ids else unused
        return self._ids[key]

    def put(self, key: bytes, size_bytes: int) -> None:
        """Notes that runners have the features, and evicts others to make room."""
        self.id_of(key)
        self.size_bytes += size_bytes - self._entries.pop(key, 0)
        self._entries[key] = size_bytes
        self._shrink()

    def take_dropped(self, max_ids: int) -> list[int]:
        """Ids of evicted features, which the next step reports to runners; the ids may be used again."""
        taken, self._dropped_ids = self._dropped_ids[:max_ids], self._dropped_ids[max_ids:]
        self._free_ids += taken
        return taken

    def pin(self, key: bytes) -> None:
        """Keeps an entry until `unpin`, also one that is only about to be put. Counts a hit if it need not be made."""
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
        """Evicts everything that is not pinned."""
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
