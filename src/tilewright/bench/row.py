"""A row of the kernel benchmark: one kernel at one shape, and torch's op with the same result."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A buffer that is reused stays in the cache, unlike the weights of a layer. Calls rotate among copies of this many
# bytes in all: five times the largest cache we have seen.
ROTATION_BYTES = 3 << 29

Call = Callable[[int], object]  # given the number of the call, so that it can rotate among buffers


@dataclass(frozen=True)
class Calls:
    """Our call and torch's, and whether ours agrees with the torch backend."""

    ours: Call
    torch: Call
    check: Callable[[], bool]


@dataclass(frozen=True)
class Row:
    """One kernel at one shape. Its tensors are made by `prepare`, so that only one row's are in memory at a time."""

    name: str
    shape: str
    bytes_moved: int  # each input read once, each output written once
    flops: int
    prepare: Callable[[], Calls]
    group: str = ""  # rows of one group get a geometric mean


def rotation(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Copies of the tensors, the originals first, that take ROTATION_BYTES together; at least two."""
    return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(num_copies(*tensors) - 1))]


def num_copies(*tensors: Tensor) -> int:
    """The number of copies in a rotation of the tensors."""
    size_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return max(2, -(-ROTATION_BYTES // size_bytes))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers, the same in every run."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(actual: Tensor, expected: Tensor, steps: float = 2.0) -> bool:
    """Whether two results differ by a few rounding steps of bf16 (2^-8) at most; NaN is never close."""
    actual, expected = actual.float(), expected.float()
    allowed = steps * 2**-8 * (expected.abs() + expected.abs().mean())
    return bool(((actual - expected).abs() <= allowed).all())
