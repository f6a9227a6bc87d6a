"""Keys and values of cross-attention: groups of adjacent images, and the cache of their pages, by content."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from tilewright.types import Medium


@dataclass(frozen=True, eq=False)  # eq=False: the same images may come twice in a prompt, as two groups with one key
class CrossGroup:
    """Media with adjacent placeholders. Tokens `start` .. `stop` see those of them up to their own position.

    Their states are concatenated: the token of the second medium sees the states of the first two, that of the third
    the states of all three.
    """

    media: tuple[Medium, ...]
    start: int
    stop: int  # where the next group starts

    @cached_property
    def key(self) -> bytes:
        """16 bytes that identify the contents, in order."""
        return group_key(medium.key for medium in self.media)

    @property
    def num_states(self) -> int:
        return sum(medium.num_states for medium in self.media)

    def cross_spans(self, start: int, stop: int) -> Iterator[CrossSpan]:
        """Yield the spans of tokens start .. stop that see the group, with the number of states each sees."""
        num_states = 0
        for index, medium in enumerate(self.media):
            num_states += medium.num_states
            first = self.start + index
            last = first + 1 if index + 1 < len(self.media) else self.stop
            if max(first, start) < min(last, stop):
                yield CrossSpan(self, max(first, start), min(last, stop), num_states)


@dataclass(frozen=True)
class CrossSpan:
    """Tokens start .. stop of a sequence, which see the first num_states states of a group."""

    group: CrossGroup
    start: int
    stop: int
    num_states: int


def group_key(media_keys: Iterable[bytes]) -> bytes:
    """Return 16 bytes that identify adjacent media, from their own keys."""
    return blake2b(b"".join(media_keys), digest_size=16).digest()


def cross_groups_of(media: Iterable[Medium]) -> list[CrossGroup]:
    """Return the groups of a prompt in order, without media whose features replace tokens."""
    groups: list[list[Medium]] = []
    for medium in sorted((item for item in media if item.num_states), key=_place):
        if groups and _place(groups[-1][-1]) + 1 == _place(medium):
            groups[-1].append(medium)
        else:
            groups.append([medium])
    starts = [_place(group[0]) for group in groups]
    return [
        CrossGroup(tuple(group), start, stop)
        for group, start, stop in zip(groups, starts, [*starts[1:], sys.maxsize], strict=False)
    ]


def _place(medium: Medium) -> int:
    return medium.spans[0].start


@dataclass
class _Entry:
    pages: np.ndarray  # int32
    is_filled: bool = False


class CrossCache:
    """num_pages pages of page_size states, allocated per group, the least recently used group evicted first.

    A group that a running sequence sees is pinned and keeps its pages. An unfilled group frees them with its last pin.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_pages_used = 0  # of pinned groups, which cannot be evicted
        self.num_lookups = 0
        self.num_hits = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._pins: Counter[bytes] = Counter()

    @property
    def num_states(self) -> int:
        """States that the largest group may have."""
        return self.num_pages * self.page_size

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_lookups)

    def is_filled(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_filled

    def pages(self, key: bytes) -> np.ndarray:
        """Return the pages of a group, int32; KeyError if it has none."""
        self._entries.move_to_end(key)
        return self._entries[key].pages

    def slots(self, key: bytes, num_states: int) -> np.ndarray:
        """Return where each state of the group is stored, int64: page * page_size + offset."""
        place = np.arange(num_states)
        return self.pages(key)[place // self.page_size].astype(np.int64) * self.page_size + place % self.page_size

    def pin(self, group: CrossGroup) -> bool:
        """Give the group pages until `unpin`; return False if too many others are pinned."""
        key, needed = group.key, -(-group.num_states // self.page_size)
        is_known = key in self._entries
        if not is_known:
            if not self._make_room(needed):
                return False
            self._entries[key] = _Entry(np.array([self._free.pop() for _ in range(needed)], np.int32))
        self.num_lookups += 1
        self.num_hits += is_known
        self._pins[key] += 1
        if self._pins[key] == 1:
            self.num_pages_used += needed
        return True

    def fill(self, key: bytes) -> None:
        """Record that the group's keys and values are written."""
        self._entries[key].is_filled = True

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]
            self.num_pages_used -= len(self._entries[key].pages)
            if not self._entries[key].is_filled:
                self._drop(key)

    def clear(self) -> None:
        """Drop every group that is not pinned."""
        for key in [key for key in self._entries if key not in self._pins]:
            self._drop(key)

    def _make_room(self, num_pages: int) -> bool:
        unpinned = [key for key in self._entries if key not in self._pins]
        if len(self._free) + sum(len(self._entries[key].pages) for key in unpinned) < num_pages:
            return False
        for key in unpinned:
            if len(self._free) >= num_pages:
                break
            self._drop(key)
        return True

    def _drop(self, key: bytes) -> None:
        self._free.extend(self._entries.pop(key).pages.tolist())
