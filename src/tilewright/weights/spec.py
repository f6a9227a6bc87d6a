"""Weights of a model and their sources: which tensors of a checkpoint each is made of, and how they are laid out.

Layers hold `Weight`s as attributes; `weights.load` finds them (`iter_weights`), checks all their sources against the
checkpoint at once, and fills `value` one weight at a time, from blocks of rows where it can, so that no more than the
packed model and one tensor are in memory. A weight shared by two layers (a tied head) is one object, loaded once. A
source that is split over ranks is read as this rank's part of it (`Sharded`), and has that part's shape.

An axis is split by one rule, for heads, widths and vocabularies of every model: each rank has an equal part. An axis
that does not divide is padded with zeros, which add nothing to any sum: a padded head has zero rows in its projections
and zero columns in the projection back.
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

from tilewright.ops.quantized import QuantFormat, Quantized, columns_of, concatenate, zeros_like

PADDING = -1  # first entry of a run of zeros
# A rank's share of a width is rounded up to whole tiles of the packed weights, if that adds at most a sixteenth.
ALIGNMENT = 32
MOST_ADDED = 1 / 16


@dataclass(frozen=True)
class Shard:
    """A rank's part of an axis: concatenated runs (first entry, length); a run that starts at PADDING is zeros."""

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
        """Concatenate two shards."""
        return _shard([*self.runs, *other.runs])

    def times(self, unit: int) -> Shard:
        """Return the shard with every entry expanded to `unit` entries, such as the rows of heads."""
        return Shard(tuple((first if first == PADDING else first * unit, length * unit) for first, length in self.runs))

    def after(self, offset: int) -> Shard:
        """Return the shard moved by `offset`, as a part of a fused projection."""
        return Shard(tuple((first if first == PADDING else first + offset, length) for first, length in self.runs))

    def between(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of its own entries [begin, end)."""
        place = 0
        for first, length in self.runs:
            low, high = max(begin, place), min(end, place + length)
            if low < high:
                yield (first if first == PADDING else first + low - place), high - low
            place += length

    def entries(self) -> list[int]:
        """Return each entry separately, PADDING for zeros."""
        return [entry for first, length in self.runs for entry in _entries(first, length)]


def _entries(first: int, length: int) -> Iterator[int]:
    return iter(range(first, first + length)) if first != PADDING else itertools.repeat(PADDING, length)


def _shard(runs: list[tuple[int, int]]) -> Shard:
    """Return the shard of these runs, with adjacent ones joined."""
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
    """Return the shard of these entries, PADDING for zeros."""
    return _shard([(entry, 1) for entry in entries])


def stacked(shard: Shard, length: int, count: int) -> Shard:
    """Return the same entries of each of `count` stacked parts of `length`, such as gate and up."""
    return sum((shard.after(part * length) for part in range(1, count)), shard)


def split_width(width: int, rank: int, size: int, block: int = 1) -> Shard:
    """Return a rank's consecutive entries of a width: equally many each, in whole blocks that share a scale."""
    share = share_of_width(width, size, block)
    first = min(rank * share, width)
    count = min(share, width - first)
    return _shard([(first, count), (PADDING, share - count)])


def share_of_width(width: int, size: int, block: int = 1) -> int:
    """Return the number of entries of one rank, including padding."""
    if size == 1:
        return width
    share = _round_up(-(-width // size), block)
    aligned = _round_up(share, math.lcm(block, ALIGNMENT))
    return aligned if aligned <= share * (1 + MOST_ADDED) else share


def heads_together(block: int, *head_widths: int) -> int:
    """Return how many heads fill whole blocks of entries that share a scale."""
    return math.lcm(*(math.lcm(width, block) // width for width in head_widths))


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@dataclass(frozen=True)
class HeadShard:
    """The heads of a rank: equally many queries for each of its keys, so that kernels need no table of them."""

    queries: Shard  # query heads
    keys: Shard  # kv heads; several ranks may have the same one
    num_queries: int
    num_keys: int


def split_heads(num_queries: int, num_keys: int, rank: int, size: int, together: int = 1) -> HeadShard:
    """Return a rank's query heads with the kv heads they read; for a delta net value heads with key heads.

    The queries of a key are cut into units of equal size, the last padded; ranks have equally many units. Ranks with
    units of the same key each have a copy of it. Of all cuts the one with the fewest heads of both kinds per rank is
    chosen, with fewer keys among equals: they take up the cache. `together` keys, whose rows share scales, are on one
    rank with all their queries.
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
    """A tensor of the checkpoint, the shape it must have, and this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard | None, ...] = ()  # of its first axes; None: all of an axis

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        own = [shard.length if shard else size for size, shard in zip(self.shape, self.shards, strict=False)]
        return (*own, *self.shape[len(own) :])


class Reader(Protocol):
    """Reads a source as bf16 or fp32, whatever type the file has."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """Return all of it."""

    def rows(self, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of its first axis. The memory of earlier rows may be released: copy what is kept."""


class QuantizedReader(Reader, Protocol):
    """A source with quants and scales in the file."""

    def quantized_rows(self, begin: int, end: int) -> Quantized:
        """Return rows [begin, end) as quants."""


class Weight(ABC, Generic[Value]):
    """A weight of the model: its sources, and its value once it is loaded.

    Attributes other than the value are plain (numbers, strings, tuples of them): with the class they are the `recipe`.
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
        """Make the value from its sources, in order, without keeping their memory."""

    def fill(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        """Set the value from its sources, in order."""
        pairs = zip(self.sources, readers, strict=True)
        self.build_from([Sharded(reader, source) if any(source.shards) else reader for source, reader in pairs], dtype)

    def build(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Set the value from tensors in memory."""
        self.fill([_InMemory(tensor) for tensor in tensors], dtype)

    def keep_quants(self, formats: Sequence[QuantFormat | None]) -> None:
        """Tell the weight, before `fill`, in which formats its sources have quants: it may choose to keep them."""

    def restore(self, value: Value) -> None:
        """Set the value to that of a weight with the same recipe."""
        self._value = value

    @property
    def recipe(self) -> str:
        """All that the value depends on except the sources' contents and the dtype: same recipe, same value."""
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
        """Return this rank's part of the axes after the first."""
        for axis, shard in enumerate(self._shards[1:], start=1):
            if shard is not None:
                tensor = along(tensor, axis, shard)
        return tensor


def along(tensor: Tensor, axis: int, shard: Shard) -> Tensor:
    """Return a rank's part of an axis: a view if it is one run."""
    if len(shard.runs) == 1 and shard.runs[0][0] != PADDING:
        return tensor.narrow(axis, *shard.runs[0])
    padding = list(tensor.shape)
    pieces = []
    for first, length in shard.runs:
        padding[axis] = length
        pieces.append(tensor.new_zeros(padding) if first == PADDING else tensor.narrow(axis, first, length))
    return torch.cat(pieces, dim=axis)


def iter_weights(part: object) -> Iterator[Weight]:
    """Yield every weight of a model once, in the order of its layers' attributes."""
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
