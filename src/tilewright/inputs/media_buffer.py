"""Where the patches of media lie until the encoder reads them: one buffer, written while requests wait for a step.

It is a file in memory: pages are taken row by row as patches are written, and given back with the request. Regions are
numbers, so that other ranks, which map the same file (`map_rows`), find them too.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.host.memory import MAP_NORESERVE, available_bytes, shared_file
from tilewright.ops import backend
from tilewright.types import Region, RequestError

Write = Callable[[Tensor], None]  # decodes a medium and writes its patches to the rows [num_rows, width] it is given

# Of the memory that is free once the weights are loaded, of which keys and values take half. They need 100 KB and more
# for a token of a picture or a video, its patches 6 KB or 12: they fill up first.
SHARE_OF_FREE_MEMORY = 0.25
MIN_BYTES = 256 << 20  # 40 pictures of 1024 x 1024
# Memory that a GPU reads by itself is taken whole, and from all other programs: 160 pictures of 1024 x 1024.
MAX_PINNED_BYTES = 1 << 30
POLL_S = 0.05  # how often a request that finds no room looks again

_log = logging.getLogger(__name__)


class Allocation:
    """The regions of one request's media, one after the other. They are free once it is garbage, or by `release`."""

    def __init__(self, regions: tuple[Region, ...], free: Callable[[tuple[Region, ...]], None]) -> None:
        self.regions = regions
        self.release = weakref.finalize(self, free, regions)
        self.release.atexit = False  # the memory goes with the process


class MediaBuffer:
    """Rows of `width` elements of one dtype, for any thread. A request that finds no room waits for one that ends."""

    def __init__(self, width: int, dtype: torch.dtype, size_bytes: int | None = None) -> None:
        if size_bytes is None:
            size_bytes = max(int(available_bytes() * SHARE_OF_FREE_MEMORY), MIN_BYTES)
        self._row_bytes = width * dtype.itemsize
        place = backend.place()
        self._memory: mmap.mmap | None = None  # None: memory that a device reads by itself, and keeps
        if place.is_host:
            self.fd = shared_file("media")
            self._memory = _map_new(self.fd, max(size_bytes, self._row_bytes))
            self.num_rows = len(self._memory) // self._row_bytes
            self.rows = _rows(self._memory, self.num_rows, width, dtype)
            weakref.finalize(self, os.close, self.fd)
        else:
            self.num_rows = max(min(size_bytes, MAX_PINNED_BYTES) // self._row_bytes, 1)
            self.rows = place.host_bytes(self.num_rows * self._row_bytes).view(dtype).view(self.num_rows, width)
        self._unwritten: dict[int, Write] = {}  # by first row
        self._turn = threading.Lock()  # of those that allocate: a large request is not passed by small ones
        self._free = [(0, self.num_rows)]  # [begin, end) of rows, in order, none next to another
        self._lock = threading.Lock()  # guards _free
        self._garbage: deque[tuple[Region, ...]] = deque()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and their width: what another process maps the file with."""
        return self.num_rows, self.rows.shape[1]

    @property
    def num_free_rows(self) -> int:
        return sum(end - begin for begin, end in list(self._free))

    def allocate(
        self, row_counts: Sequence[int], check_cancelled: Callable[[], None] = lambda: None
    ) -> Allocation | None:
        """Neighbouring regions of so many rows each, None for no media; waits until there is room for them.

        `check_cancelled` raises once nobody needs them any more.
        """
        num_rows = sum(row_counts)
        if num_rows > self.num_rows:
            raise RequestError(
                f"the request's media take {num_rows * self._row_bytes} bytes once prepared, the limit is "
                f"{self.num_rows * self._row_bytes}: a share of this machine's memory"
            )
        if not num_rows:
            return None
        with self._turn:
            while (first_row := self._take(num_rows)) is None:
                check_cancelled()
                time.sleep(POLL_S)
        regions = []
        for count in row_counts:
            regions.append(Region(first_row, count))
            first_row += count
        return Allocation(tuple(regions), self._release)

    def write_later(self, region: Region, write: Write) -> None:
        """Leaves a region unwritten until `load` asks for it, if ever: an encoder that has seen the medium does not."""
        self._unwritten[region.first_row] = write

    def load(self, region: Region) -> None:
        """Writes a region that was left unwritten."""
        write = self._unwritten.get(region.first_row)
        if write is not None:
            write(self.view(region))
            self._unwritten.pop(region.first_row, None)

    def is_written(self, region: Region) -> bool:
        return region.first_row not in self._unwritten

    def view(self, region: Region) -> Tensor:
        """The rows [num_rows, width] of a region."""
        return self.rows[region.first_row : region.first_row + region.num_rows]

    def _take(self, num_rows: int) -> int | None:
        """The first row of the first gap that is large enough."""
        with self._lock:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= num_rows:
                    self._free[index : index + 1] = [(begin + num_rows, end)] if end - begin > num_rows else []
                    break
            else:
                begin = -1
        self._collect()  # what became garbage meanwhile
        return None if begin < 0 else begin

    def _release(self, regions: tuple[Region, ...]) -> None:
        """Called when an allocation is garbage: in any thread, within any line of it, one of this class included."""
        self._garbage.append(regions)
        self._collect()

    def _collect(self) -> None:
        """Frees what is garbage, unless someone holds the lock, who then does it afterwards."""
        while self._garbage and self._lock.acquire(blocking=False):
            try:
                while self._garbage:
                    self._return(self._garbage.popleft())
            finally:
                self._lock.release()

    def _return(self, regions: tuple[Region, ...]) -> None:
        for region in regions:
            self._unwritten.pop(region.first_row, None)
        begin, end = regions[0].first_row, regions[-1].first_row + regions[-1].num_rows
        gap_begin, gap_end = begin, end
        others = []
        for other in self._free:
            if other[1] == begin:
                gap_begin = other[0]
            elif other[0] == end:
                gap_end = other[1]
            else:
                others.append(other)
        self._free = sorted([*others, (gap_begin, gap_end)])
        self._give_back(begin, end, gap_begin, gap_end)

    def _give_back(self, begin: int, end: int, gap_begin: int, gap_end: int) -> None:
        """Returns the pages of rows begin to end to the system: those that no row outside the gap has a part of."""
        if self._memory is None:
            return
        page, row = mmap.PAGESIZE, self._row_bytes
        first = max(begin * row // page, -(-gap_begin * row // page))
        last = min(-(-end * row // page), gap_end * row // page)
        if last > first:
            self._memory.madvise(mmap.MADV_REMOVE, first * page, (last - first) * page)


def map_rows(fd: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The rows of another process's buffer, by its file and shape."""
    return _rows(mmap.mmap(fd, num_rows * width * dtype.itemsize, mmap.MAP_SHARED), num_rows, width, dtype)


def _rows(memory: mmap.mmap, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    count = num_rows * width * dtype.itemsize
    return torch.frombuffer(memory, dtype=torch.uint8, count=count).view(dtype).view(num_rows, width)


def _map_new(fd: int, size_bytes: int) -> mmap.mmap:
    """So many bytes, or half, or a quarter of them: as many as the system lets a process map."""
    while True:
        try:
            os.ftruncate(fd, size_bytes)
            return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | MAP_NORESERVE)
        except OSError as error:  # a limit of address space or of file sizes
            if size_bytes < mmap.PAGESIZE:
                raise
            _log.warning("%d bytes for media cannot be reserved (%s): half of them is tried", size_bytes, error)
            size_bytes //= 2
