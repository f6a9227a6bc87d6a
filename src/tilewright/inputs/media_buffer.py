"""The buffer with the patches of media, written while requests wait for a step, read by the encoder.

It is a file in memory: pages are allocated as patches are written, and freed with the request. Regions are row numbers,
so that other ranks, which map the same file (`map_rows`), can use them too.
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

Write = Callable[[Tensor], None]  # decodes a medium and writes its patches to rows [num_rows, width]

# Share of the memory that is free once the weights are loaded; keys and values get half. A token of an image or video
# needs 100 KB or more of keys and values and 6 or 12 KB of patches, so that keys and values fill up first.
SHARE_OF_FREE_MEMORY = 0.25
MIN_BYTES = 256 << 20  # 40 images of 1024 x 1024
# Pinned memory, which a GPU reads, is allocated at once and unavailable to other programs: 160 images of 1024 x 1024.
MAX_PINNED_BYTES = 1 << 30
POLL_S = 0.05  # between attempts of a request that waits for room

_log = logging.getLogger(__name__)


class Allocation:
    """The contiguous regions of one request's media, freed when this object is collected, or by `release`."""

    def __init__(self, regions: tuple[Region, ...], free: Callable[[tuple[Region, ...]], None]) -> None:
        self.regions = regions
        self.release = weakref.finalize(self, free, regions)
        self.release.atexit = False  # the process's end frees the memory


class MediaBuffer:
    """Rows of `width` elements of one dtype. Thread-safe; a request without room waits until another one ends."""

    def __init__(self, width: int, dtype: torch.dtype, size_bytes: int | None = None) -> None:
        if size_bytes is None:
            size_bytes = max(int(available_bytes() * SHARE_OF_FREE_MEMORY), MIN_BYTES)
        self._row_bytes = width * dtype.itemsize
        place = backend.place()
        self._memory: mmap.mmap | None = None  # None: pinned memory of a device
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
        self._turn = threading.Lock()  # held while allocating, so that small requests do not overtake a large one
        self._free = [(0, self.num_rows)]  # sorted [begin, end) of rows, no two adjacent
        self._lock = threading.Lock()  # guards _free
        self._garbage: deque[tuple[Region, ...]] = deque()

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and their width, with which another process maps the file."""
        return self.num_rows, self.rows.shape[1]

    @property
    def num_free_rows(self) -> int:
        return sum(end - begin for begin, end in list(self._free))

    def allocate(
        self, row_counts: Sequence[int], check_cancelled: Callable[[], None] = lambda: None
    ) -> Allocation | None:
        """Allocate contiguous regions of these row counts, waiting for room; return None without any media.

        `check_cancelled` raises if the request is cancelled meanwhile.
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
        """Postpone writing a region to `load`, which is not called if the medium's encoder output is cached."""
        self._unwritten[region.first_row] = write

    def load(self, region: Region) -> None:
        """Write a region whose writing was postponed."""
        write = self._unwritten.get(region.first_row)
        if write is not None:
            write(self.view(region))
            self._unwritten.pop(region.first_row, None)

    def is_written(self, region: Region) -> bool:
        return region.first_row not in self._unwritten

    def view(self, region: Region) -> Tensor:
        """Return the rows [num_rows, width] of a region."""
        return self.rows[region.first_row : region.first_row + region.num_rows]

    def _take(self, num_rows: int) -> int | None:
        """Take rows from the first gap that is large enough; return the first row, or None if there is none."""
        with self._lock:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= num_rows:
                    self._free[index : index + 1] = [(begin + num_rows, end)] if end - begin > num_rows else []
                    break
            else:
                begin = -1
        self._collect()  # allocations collected meanwhile
        return None if begin < 0 else begin

    def _release(self, regions: tuple[Region, ...]) -> None:
        """Free the regions of a collected allocation. The collector may call this in any thread and at any line."""
        self._garbage.append(regions)
        self._collect()

    def _collect(self) -> None:
        """Free collected regions, unless another caller holds the lock and will free them."""
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
        self._return_pages(begin, end, gap_begin, gap_end)

    def _return_pages(self, begin: int, end: int, gap_begin: int, gap_end: int) -> None:
        """Return the pages of rows [begin, end) to the system, except pages shared with rows outside the gap."""
        if self._memory is None:
            return
        page, row = mmap.PAGESIZE, self._row_bytes
        first = max(begin * row // page, -(-gap_begin * row // page))
        last = min(-(-end * row // page), gap_end * row // page)
        if last > first:
            self._memory.madvise(mmap.MADV_REMOVE, first * page, (last - first) * page)


def map_rows(fd: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Map the rows of another process's buffer from its file and shape."""
    return _rows(mmap.mmap(fd, num_rows * width * dtype.itemsize, mmap.MAP_SHARED), num_rows, width, dtype)


def _rows(memory: mmap.mmap, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    count = num_rows * width * dtype.itemsize
    return torch.frombuffer(memory, dtype=torch.uint8, count=count).view(dtype).view(num_rows, width)


def _map_new(fd: int, size_bytes: int) -> mmap.mmap:
    """Map `size_bytes`, or a half, a quarter, ... of them if the system's limits require."""
    while True:
        try:
            os.ftruncate(fd, size_bytes)
            return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | MAP_NORESERVE)
        except OSError as error:  # a limit of address space or of file sizes
            if size_bytes < mmap.PAGESIZE:
                raise
            _log.warning("%d bytes for media cannot be reserved (%s): trying half of them", size_bytes, error)
            size_bytes //= 2
