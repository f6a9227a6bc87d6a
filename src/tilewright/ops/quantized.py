"""Weights as small whole numbers, in plain torch: how they are rounded, and what they stand for.

A number q of a group of a row stands for scale * q or, in formats with mins, for scale * q - min. Scales and mins of
groups are fp16, those of whole rows fp32: numbers are chosen for the scale as it is stored. csrc/base/packed_weight.h
has the same formats, csrc/kernels/linear/quantized.h the products, in which x is rounded by `quantize_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("int8", "int8_min", "int4", "uint4")
WITH_MINS = ("int8_min", "uint4")
GROUP_SIZES = (16, 32, 64, 128, 256)

# Below, a group counts as zeros: 127 / max would overflow.
LEAST_MAX = 1e-30
# How far from zero the largest value of a group of int4 is put, of -8 at most: it is cut off there where that brings
# the others nearer. Of five such places the error of the best is 9 % below that of the first alone, on normal values.
_INT4_PLACES = (8.0, 7.6, 7.2, 6.8, 9.0)
# Of the range from the least to the largest value of a group of uint4, the parts that are tried. Each is then fitted to
# its numbers so often; together that takes 15 % off the squared error, on values of normal and of Laplace shape.
_UINT4_PARTS, _NUM_FITS = (1.0, 0.9, 0.82), 2


@dataclass(frozen=True)
class Quantized:
    """A weight [n, k] as whole numbers. `group_size`: values of a row that share a scale; 0: all of them."""

    name: str
    values: Tensor  # [n, k], int8; of uint4 uint8
    scales: Tensor  # [n, groups]
    mins: Tensor | None = None
    group_size: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize(weight: Tensor, name: str, group_size: int = 0) -> Quantized:
    """`weight` [n, k], fp32 or bf16, in the format of that name."""
    k = weight.shape[1]
    grouped = in_groups(weight.float(), group_size)
    if name == "int8":
        scales = stored_scale(grouped.abs().amax(-1) / 127, group_size)
        numbers, mins = (grouped * _inverse(scales)).round().clamp(-127, 127), None
    elif name == "int4":
        scales, numbers = _int4(grouped, group_size)
        mins = None
    elif name == "uint4":
        scales, mins, numbers = _uint4(grouped, group_size)
    elif name == "int8_min":
        least, most = grouped.amin(-1), grouped.amax(-1)
        scales = stored_scale((most - least) / 254, group_size)
        mins = stored_scale(-127 * scales.float() - least, group_size)
        numbers = ((grouped + mins.float()[..., None]) * _inverse(scales)).round().clamp(-127, 127)
    else:
        raise ValueError(f"the format is {name!r}, expected one of {', '.join(NAMES)}")
    dtype = torch.uint8 if name == "uint4" else torch.int8
    return Quantized(name, numbers.to(dtype).flatten(1)[:, :k].contiguous(), scales, mins, group_size)


class _Best:
    """Of several ways to round each group, the one with the least squared error: scales, mins if any, numbers."""

    def __init__(self) -> None:
        self.error: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def offer(self, error: Tensor, *parts: Tensor) -> None:
        if self.error is None:
            self.error, self.parts = error, parts
            return
        is_better = error < self.error
        self.error = torch.where(is_better, error, self.error)
        self.parts = tuple(
            torch.where(is_better.view(*is_better.shape, *[1] * (new.dim() - is_better.dim())), new, old)
            for new, old in zip(parts, self.parts, strict=True)
        )


def _int4(grouped: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Scales and numbers of the least squared error among some places for the value farthest from zero."""
    farthest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
    best = _Best()
    for place in _INT4_PLACES:
        scales = stored_scale(farthest / -place, group_size)
        numbers = (grouped * _inverse(scales)).round_().clamp_(-8, 7)
        error = torch.addcmul(grouped, numbers, scales.float()[..., None], value=-1).square_().sum(-1)
        best.offer(error, scales, numbers)
    scales, numbers = best.parts
    return scales, numbers


def _uint4(grouped: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, mins and numbers of the least squared error among parts of the range, each fitted to its numbers."""
    least, most = grouped.amin(-1), grouped.amax(-1)
    mean = grouped.mean(-1)
    best = _Best()
    for part in _UINT4_PARTS:
        cut = (most - least) * (0.5 - 0.5 * part)
        scale, low = (most - least) * (part / 15), least + cut
        for _ in range(1 + _NUM_FITS):
            scales, mins = stored_scale(scale, group_size), stored_scale(-low, group_size)
            numbers = ((grouped + mins.float()[..., None]) * _inverse(scales)).round_().clamp_(0, 15)
            error = torch.addcmul(grouped + mins.float()[..., None], numbers, scales.float()[..., None], value=-1)
            best.offer(error.square_().sum(-1), scales, mins, numbers)
            # The line through the numbers with the least squared error; a group of one number keeps its own.
            centre = numbers.mean(-1)
            apart = numbers - centre[..., None]
            spread = apart.square().sum(-1)
            scale = torch.where(spread > 0, (apart * grouped).sum(-1) / spread.clamp(min=1e-20), scale)
            low = mean - scale * centre
    scales, mins, numbers = best.parts
    return scales, mins, numbers


def dequantize(weight: Quantized) -> Tensor:
    """What the numbers stand for, fp32 [n, k]."""
    k = weight.values.shape[1]
    grouped = in_groups(weight.values.float(), weight.group_size) * weight.scales.float()[..., None]
    if weight.mins is not None:
        grouped = grouped - weight.mins.float()[..., None]
    return grouped.flatten(1)[:, :k]


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """Rows of one format one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    mins = None if first.mins is None else torch.cat([part.mins for part in parts if part.mins is not None])
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    return Quantized(first.name, values, scales, mins, first.group_size)


def zeros_like(weight: Quantized, num_rows: int) -> Quantized:
    """Rows that stand for zeros, of the format and width of another weight."""

    def zeros(part: Tensor) -> Tensor:
        return part.new_zeros(num_rows, part.shape[1])

    mins = None if weight.mins is None else zeros(weight.mins)
    return Quantized(weight.name, zeros(weight.values), zeros(weight.scales), mins, weight.group_size)


def columns_of(weight: Quantized, runs: Sequence[tuple[int, int]]) -> Quantized:
    """Runs (first, length) of the columns, whole groups of them; those from a negative column on stand for zeros."""
    size = weight.group_size

    def cut(part: Tensor, unit: int) -> Tensor:
        pieces = [
            part.new_zeros(len(part), length // unit) if first < 0 else part.narrow(1, first // unit, length // unit)
            for first, length in runs
        ]
        return torch.cat(pieces, 1)

    for first, length in runs:
        if length % size or (first >= 0 and first % size):
            raise ValueError(f"columns {first} to {first + length} are no whole groups of {size}")
    mins = None if weight.mins is None else cut(weight.mins, size)
    return Quantized(weight.name, cut(weight.values, 1), cut(weight.scales, size), mins, size)


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x [..., k] as products with quantised weights take it: whole numbers [..., groups, size] in fp32, and scales.

    A NaN or an infinity makes the scale of its group a NaN.
    """
    grouped = in_groups(x.float(), group_size)
    most = grouped.abs().nan_to_num(0, torch.inf).amax(-1, keepdim=True)
    is_zero = ~(most > LEAST_MAX)
    # Not 127.0 / most, which torch computes as a reciprocal and a product: two roundings.
    inverse = torch.full_like(most, 127.0) / most
    numbers = torch.where(is_zero, 0.0, (grouped * inverse).round())
    scales = torch.where(is_zero, 0.0, most / 127.0) + (grouped * 0).sum(-1, keepdim=True)
    return numbers.nan_to_num(0, 0, 0), scales[..., 0]


def in_groups(x: Tensor, group_size: int) -> Tensor:
    """x [..., k] as [..., groups, size], the last group filled up with zeros."""
    size = group_size or x.shape[-1]
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def scale_dtype(group_size: int) -> torch.dtype:
    return torch.float16 if group_size else torch.float32


def stored_scale(scales: Tensor, group_size: int) -> Tensor:
    """Scales or mins as they are kept. ValueError where one is too large for that, or not a number."""
    kept = scales.to(scale_dtype(group_size))
    if not kept.is_meta and not bool(kept.isfinite().all()):
        raise ValueError(f"a scale of {scales.abs().max().item():.3g} cannot be kept as {kept.dtype}")
    return kept


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()[..., None]
    return torch.where(wide == 0, 0.0, 1.0 / wide)
