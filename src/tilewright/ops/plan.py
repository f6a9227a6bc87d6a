"""Steps recorded once and replayed natively, as CUDA graphs are on GPUs.

    plan = Plan(arena)
    with plan.record():
        logits = model.forward(batch)   # runs, and every kernel call is recorded
    ...
    plan.replay()                       # the same calls on the same memory, in one native call and one parallel region

Inputs are fixed buffers whose contents change between replays. Results of ops come from the arena, so that their memory
is reserved and all plans share it: only one runs at a time. Steps that are not recorded gain from it too (`Arena.use`):
fresh memory costs a page fault per 4 KB, which took a third of a large linear's time on 16 cores.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.native import kernels

# For pages of 4 KiB; with 16 or 64 KiB, huge pages have 32 or 512 MiB, and a tensor gets those within it.
HUGE_PAGE_BYTES = 2 << 20

_log = logging.getLogger(__name__)


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a flat zeroed tensor whose memory should be in huge pages: streaming it costs a TLB miss per 2 MB.

    On another device it is that device's own memory.
    """
    size_bytes = num_elements * dtype.itemsize
    device = backend.device()
    if size_bytes < HUGE_PAGE_BYTES or device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    # Private: Linux gives shared memory no huge pages unless configured (shmem_enabled is "never" by default). One page
    # more than needed, so that the tensor can begin on a boundary; untouched memory costs nothing.
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    try:
        # Not the rest after the last whole page: it would take 2 MB whatever its size.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    except OSError as error:  # a kernel without huge pages, as on small boards
        _log.debug("%d bytes are in small pages: %s", size_bytes, error)
    return whole[begin : begin + size_bytes].view(dtype)


ALIGNMENT_BYTES = 64
MIN_CHUNK_BYTES = 8 << 20


class _Current(threading.local):
    arena: Arena | None = None


_current = _Current()


class Arena:
    """Memory allocated front to back and freed by scopes. It grows by chunks, which never move."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = 0
        self._used_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        while self._chunk < len(self._chunks):
            if self._used_bytes + size_bytes <= self._chunks[self._chunk].numel():
                break
            self._chunk, self._used_bytes = self._chunk + 1, 0
        else:
            # As large as all others together: needs that grow step by step then leave few chunks behind.
            chunk_bytes = max(MIN_CHUNK_BYTES, size_bytes, self.size_bytes)
            self._chunks.append(empty_in_huge_pages(chunk_bytes, torch.uint8))
        begin = self._used_bytes
        self._used_bytes += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._chunks[self._chunk][begin : begin + size_bytes].view(dtype).view(shape)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Free what is allocated within the context when it ends."""
        mark = self._chunk, self._used_bytes
        try:
            yield
        finally:
            self._chunk, self._used_bytes = mark

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Allocate the results of this thread's ops here within the context, until the next `use`.

        Not for the torch backend: torch caches the memory of its tensors itself.
        """
        _current.arena = self if backend.active() == "native" else None
        try:
            with self.scope():
                yield
        finally:
            _current.arena = None

    @property
    def size_bytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)


class Plan:
    """The kernel calls of one step, for one shape of batch."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._native = kernels.Plan()

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record every kernel call of this thread within the context."""
        if backend.active() != "native":
            raise RuntimeError(f"the {backend.active()} backend is active: a plan records native kernels only")
        self._native.begin()
        try:
            with self._arena.use():
                yield
        finally:
            self._native.end()

    def replay(self, *, in_one_region: bool = True) -> None:
        """Make the recorded calls again, in order.

        In one parallel region the threads stay until the last call is done. Otherwise each call wakes and joins them,
        as outside a plan: for measurements of that cost.
        """
        self._native.replay(in_one_region)

    @property
    def num_calls(self) -> int:
        return self._native.num_calls


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for an op's result, from the thread's arena, or else on the backend's device."""
    arena = _current.arena
    if arena is None:
        return torch.empty(shape, dtype=dtype, device=backend.device())
    return arena.empty(shape, dtype)


def scope() -> contextlib.AbstractContextManager[None]:
    """Free results created within the context when it ends: a layer's, except the hidden state that it updates."""
    arena = _current.arena
    return contextlib.nullcontext() if arena is None else arena.scope()
