"""A row of the kernel benchmark: a kernel at one shape, and torch's op with the same result."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A buffer that is reused stays in the cache, unlike the weights of a layer. Calls rotate among copies of this many
# bytes in total: five times the largest known cache.
ROTATION_BYTES = 3 << 29

Call = Callable[[int], object]  # (number of the call), with which it rotates among buffers


@dataclass(frozen=True)
class Calls:
    """The kernel's call and torch's, and a check of the kernel against the torch backend."""

    ours: Call
    torch: Call
    check: Callable[[], bool]


@dataclass(frozen=True)
class Row:
    """A kernel at one shape. `prepare` makes its tensors, so that only one row's tensors are in memory at a time."""

    name: str
    shape: str
    bytes_moved: int  # each input read once, each output written once
    flops: int
    prepare: Callable[[], Calls]
    group: str = ""  # rows of one group get a geometric mean


def rotation(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the tensors and copies of them, at least two sets, of ROTATION_BYTES together."""
    return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(num_copies(*tensors) - 1))]


def num_copies(*tensors: Tensor) -> int:
    """Return the number of copies in a rotation of the tensors."""
    size_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return max(2, -(-ROTATION_BYTES // size_bytes))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return normally distributed numbers, the same in every run."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(actual: Tensor, expected: Tensor, steps: float = 2.0) -> bool:
    """Return whether two results differ by at most `steps` rounding steps of bf16 (2^-8); NaN is never close."""
    actual, expected = actual.float(), expected.float()
    allowed = steps * 2**-8 * (expected.abs() + expected.abs().mean())
    return bool(((actual - expected).abs() <= allowed).all())
