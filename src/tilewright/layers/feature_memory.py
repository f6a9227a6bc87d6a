"""Memory for feature maps, handed out and taken back while a picture goes through a network."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.memory import empty_in_huge_pages


class FeatureMemory:
    """Feature maps are tens to hundreds of MB: fresh memory costs a page fault per 4 KB of each, a used one nothing.

    A layer takes what it writes and gives back what nobody reads any more, so that at any time as many maps are in
    memory as are needed. The torch backend's tensors are torch's own to keep.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # by address
        self.peak_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of any contents: the smallest free memory that it fits into, or new one."""
        if backend.active() != "native":
            return torch.empty(shape, dtype=dtype, device=backend.device())
        size_bytes = max(math.prod(shape) * dtype.itemsize, 1)
        fitting = [i for i, memory in enumerate(self._free) if memory.numel() >= size_bytes]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        else:
            # All that is free is smaller. Maps grow from stage to stage or shrink: it would lie idle beside this.
            self._free.clear()
            memory = empty_in_huge_pages(size_bytes, torch.uint8)
        self._taken[memory.data_ptr()] = memory
        held = sum(memory.numel() for memory in (*self._free, *self._taken.values()))
        self.peak_bytes = max(self.peak_bytes, held)
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def like(self, x: Tensor) -> Tensor:
        return self.take(tuple(x.shape), x.dtype)

    def give(self, x: Tensor) -> None:
        """What `take` handed out is free again; of memory that is someone else's this is no news."""
        memory = self._taken.pop(x.data_ptr(), None)
        if memory is not None:
            self._free.append(memory)
