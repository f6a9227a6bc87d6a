"""How an axis of a weight is split over ranks: the one rule, for heads, widths and vocabularies of every model.

Each rank has equally much of an axis. Where it does not divide, it is padded with zeros, which add nothing to any sum:
a padded head has zero rows in its projections and zero columns in the projection back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

PADDING = -1  # where a run of zeros begins
# Entries of a rank's share of a width: whole tiles of the packed weights, where that adds no more than a sixteenth.
ALIGNMENT = 32
MOST_ADDED = 1 / 16


@dataclass(frozen=True)
class Shard:
    """What a rank has of an axis: runs (first entry, length) one after the other; those from PADDING on are zeros."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, length: int) -> Shard:
        return cls(((0, length),) if length else ())

    @property
    def length(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def num_padded(self) -> int:
        return sum(length for first, length in self.runs if first == PADDING)

    def __add__(self, other: Shard) -> Shard:
        """Both, one after the other."""
        return _shard([*self.runs, *other.runs])

    def times(self, unit: int) -> Shard:
        """The same where every entry is `unit` entries: the rows of heads."""
        return Shard(tuple((first if first == PADDING else first * unit, length * unit) for first, length in self.runs))

    def after(self, offset: int) -> Shard:
        """The same of an axis that begins at `offset` of a longer one: a part of a fused projection."""
        return Shard(tuple((first if first == PADDING else first + offset, length) for first, length in self.runs))

    def between(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs of its own entries [begin, end)."""
        place = 0
        for first, length in self.runs:
            low, high = max(begin, place), min(end, place + length)
            if low < high:
                yield (first if first == PADDING else first + low - place), high - low
            place += length

    def entries(self) -> list[int]:
        """Each entry by itself, PADDING for zeros."""
        return [entry for first, length in self.runs for entry in _entries(first, length)]


def _entries(first: int, length: int) -> Iterator[int]:
    return iter(range(first, first + length)) if first != PADDING else itertools.repeat(PADDING, length)


def _shard(runs: list[tuple[int, int]]) -> Shard:
    """Of runs in order, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for first, length in runs:
        if joined and _follows(joined[-1], first):
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length:
            joined.append((first, length))
    return Shard(tuple(joined))


def _follows(run: tuple[int, int], first: int) -> bool:
    return run[0] == first == PADDING or (PADDING not in (run[0], first) and sum(run) == first)


def shard_of(entries: list[int]) -> Shard:
    """The shard that has these entries, PADDING for zeros."""
    return _shard([(entry, 1) for entry in entries])


def stacked(shard: Shard, length: int, count: int) -> Shard:
    """The same entries of each of `count` parts of a length that lie one after the other: gate and up, say."""
    return sum((shard.after(part * length) for part in range(1, count)), shard)


def split_width(width: int, rank: int, size: int, block: int = 1) -> Shard:
    """Neighbouring entries of a width: equally many for each rank, in whole blocks of those that share a scale."""
    share = share_of_width(width, size, block)
    first = min(rank * share, width)
    count = min(share, width - first)
    return _shard([(first, count), (PADDING, share - count)])


def share_of_width(width: int, size: int, block: int = 1) -> int:
    """Of one rank, padding included."""
    if size == 1:
        return width
    share = _round_up(-(-width // size), block)
    aligned = _round_up(share, math.lcm(block, ALIGNMENT))
    return aligned if aligned <= share * (1 + MOST_ADDED) else share


def heads_together(block: int, *head_widths: int) -> int:
    """How many heads fill whole blocks of entries that share a scale."""
    return math.lcm(*(math.lcm(width, block) // width for width in head_widths))


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@dataclass(frozen=True)
class HeadShard:
    """The heads of a rank: as many queries for each of its keys, so that kernels need no table of who reads what."""

    queries: Shard  # of the query heads
    keys: Shard  # of the key-value heads; several ranks may have the same one
    num_queries: int
    num_keys: int


def split_heads(num_queries: int, num_keys: int, rank: int, size: int, together: int = 1) -> HeadShard:
    """Query heads with the key-value heads they read; of a delta net value heads with the key heads they read.

    The queries of a key are cut into units of equally many, the last padded; ranks have equally many units. Ranks that
    have units of the same key each keep it. Of all cuts the one that leaves a rank the fewest heads of both kinds is
    taken, with fewer keys among equals: they take up the cache. So many keys as are `together`, since their rows share
    scales, are on one rank with all their queries.
    """
    group = num_queries // num_keys

    def units_per_rank(per_unit: int) -> int:
        return _round_up(-(-num_keys * -(-group // per_unit) // size), together)

    cuts = range(group, 0, -1) if together == 1 else [group]
    per_unit = min(cuts, key=lambda cut: (units_per_rank(cut) * (cut + 1), units_per_rank(cut)))
    units_per_key, count = -(-group // per_unit), units_per_rank(per_unit)
    queries: list[int] = []
    keys: list[int] = []
    for unit in range(rank * count, (rank + 1) * count):
        key, part = divmod(unit, units_per_key)
        keys.append(key if key < num_keys else PADDING)
        places = range(part * per_unit, (part + 1) * per_unit)
        queries += [key * group + place if key < num_keys and place < group else PADDING for place in places]
    return HeadShard(shard_of(queries), shard_of(keys), len(queries), len(keys))
