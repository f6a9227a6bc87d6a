"""Streams layers of a network larger than the memory: mapped weights are read ahead, and released after use.

    stream = stream_layers(network, budget_bytes)      # after its weights were mapped from the pack cache

Layers run in the same order in every step. The first ones stay in memory, as many as fit beside two of the largest; of
the others there are two at a time, the one that computes and the next: the fewest bytes that a pass over all layers can
read. A budget that holds all of them reads each once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewright.types import RequestError
from tilewright.weights.spec import iter_weights

_POPULATE_READ = 22  # Linux 5.14's MADV_POPULATE_READ, which Python does not name
AROUND_BYTES = 2 << 20  # the most that the system maps around a touched page of a file: a huge page
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range:
    """Address range of a layer's weights: contiguous, as the pack cache wrote them."""

    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    def read(self) -> None:
        """Read all of it into memory, and return when it is there."""
        begin = self.begin // mmap.PAGESIZE * mmap.PAGESIZE
        # Before Linux 5.14 this only reads ahead, and pages are mapped when touched.
        if _libc.madvise(begin, self.end - begin, _POPULATE_READ):
            _libc.madvise(begin, self.end - begin, mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Release the pages that hold nothing else: they are read from the file again when touched."""
        begin = -(-self.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)

    def widened(self, lowest: int, highest: int) -> Range:
        """Return it with what the system maps around a touched page, within [lowest, highest)."""
        return Range(max(self.begin - AROUND_BYTES, lowest), min(self.end + AROUND_BYTES, highest))


class LayerStream:
    """Address ranges of layers, in the order in which they run."""

    def __init__(self, ranges: Sequence[Range], budget_bytes: int) -> None:
        self.ranges = list(ranges)
        sizes = [one.size_bytes for one in ranges]
        # Bytes of two consecutive layers at most, the last and the first included.
        moving = max(sizes[i] + sizes[i - 1] for i in range(len(sizes)))
        if budget_bytes < moving and budget_bytes < sum(sizes):
            raise RequestError(
                f"stream_layers is {budget_bytes} bytes, expected {moving} or more: two layers are in memory at once"
            )
        self.num_kept = len(sizes)
        if sum(sizes) > budget_bytes:
            self.num_kept = 0
            while sum(sizes[: self.num_kept + 1]) + moving <= budget_bytes:
                self.num_kept += 1
        self._begin, self._end = min(one.begin for one in ranges), max(one.end for one in ranges)
        self._reader = ThreadPoolExecutor(1, "read layers")
        self._reading: dict[int, Future[None]] = {}  # of layers in memory, or being read

    def enter(self, index: int) -> None:
        """Make layer `index` ready to compute: release others, wait until it is in memory, start reading the next."""
        following = (index + 1) % len(self.ranges)
        for other in [one for one in self._reading if one not in (index, following)]:
            self._release(other)
        self._read(index)
        self._reading[index].result()
        self._read(following)

    def _read(self, index: int) -> None:
        if index not in self._reading:
            self._reading[index] = self._reader.submit(self.ranges[index].read)

    def _release(self, index: int) -> None:
        if index < self.num_kept:
            return
        self._reading.pop(index).result()
        own, others = self.ranges[index], [self.ranges[other] for other in self._reading]
        lowest = max([self._begin, *(other.end for other in others if other.end <= own.begin)])
        highest = min([self._end, *(other.begin for other in others if other.begin >= own.end)])
        own.widened(lowest, highest).release()


class StreamedLayer:
    """A layer that is read into memory when it is used."""

    def __init__(self, layer: Any, stream: LayerStream, index: int) -> None:
        self._layer, self._stream, self._index = layer, stream, index

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._stream.enter(self._index)
        return self._layer(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is a layer
            raise AttributeError(name)
        self._stream.enter(self._index)
        return getattr(self._layer, name)


def stream_layers(network: Any, budget_bytes: int) -> LayerStream | None:
    """Stream the lists of layers of a network mapped from a file; return None if it has no such list."""
    lists = {name: value for name, value in vars(network).items() if isinstance(value, list) and _are_layers(value)}
    layers = [layer for value in lists.values() for layer in value]
    if not layers:
        return None
    ranges = [_range_of(layer) for layer in layers]
    in_file = sorted(ranges, key=lambda one: one.begin)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(in_file)), "layers are not runs of the file"
    stream = LayerStream(ranges, budget_bytes)
    numbers = iter(range(len(layers)))
    for name, value in lists.items():
        setattr(network, name, [StreamedLayer(layer, stream, next(numbers)) for layer in value])
    _log.info(
        "%d of %d layers stay in memory, the others are read in every step: %.2f of %.2f GB",
        stream.num_kept,
        len(layers),
        sum(one.size_bytes for one in ranges[stream.num_kept :]) / 1e9,
        sum(one.size_bytes for one in ranges) / 1e9,
    )
    return stream


def _are_layers(items: list[Any]) -> bool:
    return len(items) > 1 and all(next(iter_weights(item), None) is not None for item in items)


def _range_of(layer: Any) -> Range:
    tensors = [tensor for weight in iter_weights(layer) for tensor in _tensors_of(weight.value)]
    return Range(
        min(tensor.data_ptr() for tensor in tensors), max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
    )


def _tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.nbytes:
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_of(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_of(getattr(value, field.name))
