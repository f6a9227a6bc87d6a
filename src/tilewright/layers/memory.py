"""State of layers between calls: reusable memory for feature maps, and first-block caching of diffusion steps.

Consecutive steps of a diffusion transformer are similar, and so is what its blocks add to the hidden state. With
first-block caching the first block is always computed; if what it adds has changed by less than a threshold since the
last full step, the other blocks are assumed to add what they added then. An approximation: off unless a request asks
for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.plan import empty_in_huge_pages


class FeatureMemory:
    """Reused memory for feature maps of tens to hundreds of MB: fresh memory costs a page fault per 4 KB.

    A layer allocates memory for its output and frees what is no longer read, so that no more maps are in memory than
    needed. The torch backend's tensors are allocated by torch.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}  # by address
        self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the smallest free memory that it fits, or in new memory."""
        if backend.active() != "native":
            return torch.empty(shape, dtype=dtype, device=backend.device())
        size_bytes = max(math.prod(shape) * dtype.itemsize, 1)
        fitting = [i for i, memory in enumerate(self._free) if memory.numel() >= size_bytes]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        else:
            # All free memory is too small. Maps grow or shrink from stage to stage: it would lie idle, so it is
            # dropped.
            self._free.clear()
            memory = empty_in_huge_pages(size_bytes, torch.uint8)
        self._in_use[memory.data_ptr()] = memory
        held = sum(memory.numel() for memory in (*self._free, *self._in_use.values()))
        self.peak_bytes = max(self.peak_bytes, held)
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(tuple(x.shape), x.dtype)

    def free(self, x: Tensor) -> None:
        """Free what `empty` returned; other memory is ignored."""
        memory = self._in_use.pop(x.data_ptr(), None)
        if memory is not None:
            self._free.append(memory)


class StepCache:
    """Additions of one run's blocks to the hidden state at the last full step."""

    def __init__(self, threshold: float) -> None:
        """Set the `threshold` below which results are reused; 0 reuses nothing.

        It bounds the mean change of what the first block adds, relative to its mean size.
        """
        self.threshold = threshold
        self.num_computed = self.num_reused = 0
        self._first: Tensor | None = None
        self._rest: Tensor | None = None

    def run(self, x: Tensor, first: Callable[[], object], rest: Callable[[], object]) -> None:
        """Update x in place by `first` and `rest`, or by `first` and the cached addition of `rest`."""
        if self.threshold <= 0:
            first()
            rest()
            return
        before = x.clone()
        first()
        added = x - before
        if self._first is not None and self._rest is not None and self._is_close(added, self._first):
            x += self._rest
            self.num_reused += 1
            return
        self._first, before = added, x.clone()
        rest()
        self._rest = x - before
        self.num_computed += 1

    def _is_close(self, added: Tensor, last: Tensor) -> bool:
        if added.shape != last.shape:
            return False
        change = (added - last).abs().mean(dtype=torch.float32)
        return bool(change < self.threshold * last.abs().mean(dtype=torch.float32))
