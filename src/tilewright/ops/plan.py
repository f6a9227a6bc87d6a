"""A step recorded once and replayed natively: what CUDA graphs do for GPUs.

    plan = Plan(arena)
    with plan.record():
        logits = model.forward(batch)   # runs, and every kernel call is noted
    ...
    plan.replay()                       # the same calls on the same memory, in one native call and one parallel region

The inputs are fixed buffers that change their contents between replays. Results of ops come from the arena, so that
their memory is no one else's and all plans share it: only one runs at a time. Steps that are not recorded gain from it
too (`Arena.use`): fresh memory costs a page fault per 4 KB, which took a third of a large linear's time on 16 cores.
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

# Where pages have 4 KiB; where they have 16 or 64, huge ones have 32 or 512 MiB, and a tensor gets those within it.
HUGE_PAGE_BYTES = 2 << 20

_log = logging.getLogger(__name__)


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor whose memory the OS is asked to back with huge pages: streaming it costs a TLB miss per 2 MB.

    It is zero, as memory from the OS is. Of a backend that computes elsewhere, it is that device's own memory.
    """
    size_bytes = num_elements * dtype.itemsize
    device = backend.device()
    if size_bytes < HUGE_PAGE_BYTES or device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    # Private: Linux gives shared memory no huge pages unless configured (shmem_enabled is "never" by default). One page
    # more than needed, so that the tensor can begin on a boundary; what is not touched takes no memory.
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    try:
        # Not the rest after the last whole page: it would take 2 MB however little it is.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    except OSError as error:  # a kernel built without them, as those of small boards are
        _log.debug("%d bytes are in small pages: %s", size_bytes, error)
    return whole[begin : begin + size_bytes].view(dtype)


ALIGNMENT_BYTES = 64
MIN_CHUNK_BYTES = 8 << 20


class _Current(threading.local):
    arena: Arena | None = None


_current = _Current()


class Arena:
    """Memory handed out front to back and taken back a scope at a time. It grows by chunks, which never move."""

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
        """What is handed out within is free again afterwards."""
        mark = self._chunk, self._used_bytes
        try:
            yield
        finally:
            self._chunk, self._used_bytes = mark

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Results of ops that this thread calls within are handed out from here, until the next `use`.

        Not those of the torch backend: torch keeps the memory of its tensors for the next ones itself.
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
        """Notes every kernel call this thread makes within."""
        if backend.active() != "native":
            raise RuntimeError(f"the {backend.active()} backend is active: a plan records native kernels only")
        self._native.begin()
        try:
            with self._arena.use():
                yield
        finally:
            self._native.end()

    def replay(self, *, in_one_region: bool = True) -> None:
        """Makes the recorded calls again, in order.

        In one parallel region: the threads stay until the last call is done. Otherwise each call wakes and joins
        them, as it does outside a plan: for measurements of what that costs.
        """
        self._native.replay(in_one_region)

    @property
    def num_calls(self) -> int:
        return self._native.num_calls


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor for the result of an op: from the arena this thread uses, else torch's, where the backend computes."""
    arena = _current.arena
    if arena is None:
        return torch.empty(shape, dtype=dtype, device=backend.device())
    return arena.empty(shape, dtype)


def scope() -> contextlib.AbstractContextManager[None]:
    """Results made within may be overwritten once it is left: a layer's, say, all but the hidden state it updates."""
    arena = _current.arena
    return contextlib.nullcontext() if arena is None else arena.scope()
