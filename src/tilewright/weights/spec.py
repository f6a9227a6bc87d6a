"""What a model needs from a checkpoint: each weight says which tensors it is made of and how they are laid out.

Layers hold `Weight`s as attributes; `weights.load` finds them (`iter_weights`), checks all their sources against the
checkpoint at once, and fills `value` one weight at a time, from blocks of rows where it can, so that no more than the
packed model and one tensor are in memory.
A weight shared by two layers (a tied head) is one object, and is loaded once. A source that is split over ranks is read
as this rank's part of it (`Sharded`): what a weight is made of then has the shapes of that part.

An axis is split by one rule, for heads, widths and vocabularies of every model: each rank has equally much of it. Where
it does not divide, it is padded with zeros, which add nothing to any sum: a padded head has zero rows in its
projections and zero columns in the projection back.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from tilewright.ops.quantized import Quantized, columns_of, concatenate, zeros_like

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


Value = TypeVar("Value")


@dataclass(frozen=True)
class WeightSource:
    """A tensor of the checkpoint, the shape it must have, and what of it this rank reads."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard | None, ...] = ()  # of its first axes; None: all of one

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of what this rank reads."""
        own = [shard.length if shard else size for size, shard in zip(self.shape, self.shards, strict=False)]
        return (*own, *self.shape[len(own) :])


class Reader(Protocol):
    """A source as it is read: bf16 or fp32, whatever the file has."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """All of it."""

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of its first axis. The memory of earlier rows may be given back: copy what is kept."""


class QuantizedReader(Reader, Protocol):
    """A source of which the file has quants with scales."""

    def quantized_rows(self, begin: int, end: int) -> Quantized:
        """Rows [begin, end) as those."""


class Weight(ABC, Generic[Value]):
    """A weight of the model: where it comes from, and its value once it is loaded.

    Attributes beside the value are plain (numbers, strings, tuples of them): with the class they are the `recipe`.
    """

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self.sources = tuple(sources)
        self._value: Value | None = None

    @property
    def value(self) -> Value:
        assert self._value is not None, f"{self.sources[0].name} is not loaded"
        return self._value

    @abstractmethod
    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        """Makes the value from what is read of the sources, in their order. It keeps none of their memory."""

    def fill(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        """Makes the value from the sources, in their order."""
        pairs = zip(self.sources, readers, strict=True)
        self.build_from([Sharded(reader, source) if any(source.shards) else reader for source, reader in pairs], dtype)

    def build(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        """The same from tensors in memory."""
        self.fill([_InMemory(tensor) for tensor in tensors], dtype)

    def keep_quants(self, formats: Sequence[tuple[str, int] | None]) -> None:
        """Told before it is made in which formats the sources have quants, in their order: it may keep those."""

    def restore(self, value: Value) -> None:
        """Takes a value that a weight of the same recipe had."""
        self._value = value

    @property
    def recipe(self) -> str:
        """All that the value depends on but the sources' contents and the dtype: same recipe, same value."""
        settings = {name: value for name, value in sorted(vars(self).items()) if name not in ("_value", "sources")}
        for name, setting in settings.items():
            if not _is_plain(setting):
                raise TypeError(f"{type(self).__name__}.{name} is {setting!r}, expected numbers, strings or tuples")
        return f"{type(self).__qualname__} {settings} {[astuple(source) for source in self.sources]}"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class _InMemory:
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> Tensor:
        return self.tensor

    def rows(self, begin: int, end: int) -> Tensor:
        return self.tensor[begin:end]


class Sharded:
    """A rank's part of a tensor, as a `Reader`."""

    def __init__(self, reader: Reader, source: WeightSource) -> None:
        self._reader = reader
        self._shards = source.shards
        self.shape = source.own_shape

    def read(self) -> Tensor:
        return self.rows(0, self.shape[0])

    def rows(self, begin: int, end: int) -> Tensor:
        rows = Shard.whole(self.shape[0]) if self._shards[0] is None else self._shards[0]
        result: Tensor | None = None
        place = 0
        for first, length in rows.between(begin, end):
            if first != PADDING:
                found = self._columns(self._reader.rows(first, first + length))
                if length == end - begin:
                    return found
                if result is None:
                    result = torch.zeros(end - begin, *found.shape[1:], dtype=found.dtype)
                result[place : place + length] = found
            place += length
        return torch.zeros(end - begin, *self.shape[1:]) if result is None else result

    def quantized_rows(self, begin: int, end: int) -> Quantized:
        rows = Shard.whole(self.shape[0]) if self._shards[0] is None else self._shards[0]
        columns = self._shards[1] if len(self._shards) > 1 else None
        runs, reader = list(rows.between(begin, end)), cast(QuantizedReader, self._reader)
        read = [reader.quantized_rows(first, first + length) for first, length in runs if first != PADDING]
        some = read[0] if read else reader.quantized_rows(0, 1)
        parts = iter(read)
        pieces = [zeros_like(some, length) if first == PADDING else next(parts) for first, length in runs]
        whole = concatenate(pieces)
        return whole if columns is None else columns_of(whole, columns.runs)

    def _columns(self, tensor: Tensor) -> Tensor:
        """What the rank has of the axes after the first."""
        for axis, shard in enumerate(self._shards[1:], start=1):
            if shard is not None:
                tensor = along(tensor, axis, shard)
        return tensor


def along(tensor: Tensor, axis: int, shard: Shard) -> Tensor:
    """What a rank has of an axis: a view where it is one run."""
    if len(shard.runs) == 1 and shard.runs[0][0] != PADDING:
        return tensor.narrow(axis, *shard.runs[0])
    padding = list(tensor.shape)
    pieces = []
    for first, length in shard.runs:
        padding[axis] = length
        pieces.append(tensor.new_zeros(padding) if first == PADDING else tensor.narrow(axis, first, length))
    return torch.cat(pieces, dim=axis)


def iter_weights(part: object) -> Iterator[Weight]:
    """Every weight of a model, once each, in the order in which its layers name them."""
    seen: set[int] = set()

    def visit(part: object) -> Iterator[Weight]:
        if isinstance(part, Weight):
            if id(part) not in seen:
                seen.add(id(part))
                yield part
        elif isinstance(part, (list, tuple)):
            for item in part:
                yield from visit(item)
        elif type(part).__module__.startswith("tilewright.") and hasattr(part, "__dict__"):
            for item in vars(part).values():
                yield from visit(item)

    return visit(part)
