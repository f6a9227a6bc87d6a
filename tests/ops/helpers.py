"""Inputs, poisoned outputs and comparisons for kernel tests."""

import torch

from tilewright.ops.packed import weight_format


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN: an element the kernel forgets to write fails every comparison."""
    return torch.full(shape, float("nan"), dtype=dtype)


def in_fp16() -> bool:
    """Whether the level in use multiplies bf16 by bf16 in fp16 (docs/numerics.md)."""
    return "fp16" in weight_format(torch.bfloat16).layout


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, rtol: float | None = None, atol: float | None = None):
    """fp32 to 1e-5, bf16 to a rounding step, relative to the size of the expected values."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    scale = max(expected.float().abs().mean().item(), 1e-6) if expected.numel() else 1.0
    half_step = expected.dtype == torch.bfloat16
    torch.testing.assert_close(
        actual,
        expected,
        rtol=rtol if rtol is not None else (2**-7 if half_step else 1e-5),
        atol=atol if atol is not None else scale * (2**-8 if half_step else 2e-5),
    )
