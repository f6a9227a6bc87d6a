"""GGUF's blocks of quantised weights as the quants, scales and mins that kernels multiply: nothing is widened.

Quants are the file's own. Scales and mins are fp16: the file's own for Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL; powers
of two for MXFP4, those below 2^-24 becoming zero; for Q4_K, Q5_K and Q6_K the product of an fp16 and a small integer,
rounded to fp16 (a relative error of at most 2^-11, beside the quants' own of 2^-6 and more).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.quantized import (
    WIDENED,
    WITH_MINS,
    WITH_ZEROS,
    QuantFormat,
    Quantized,
    quants_of,
    stored_scale,
    values_dtype,
)
from tilewright.weights.dequantize import half, power_of_two, scales_and_minima

# Quants [B, block elements], scales and mins [B, groups] of blocks of bytes [B, block bytes].
_Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Split:
    """Conversion of a tensor type's blocks to quants, scales and mins, and the format with the same quants."""

    format: QuantFormat
    block_bytes: int
    parts: Callable[[Tensor], _Parts]

    def rows(self, data: Tensor, num_rows: int) -> Quantized:
        """Return whole rows of uint8 [rows * row bytes] as quants."""
        name, group_size = self.format
        values, scales, mins = self.parts(data.view(-1, self.block_bytes))
        return Quantized(
            name,
            values.to(values_dtype(name)).reshape(num_rows, -1),
            stored_scale(scales, name, group_size).reshape(num_rows, -1),
            None if mins is None else stored_scale(mins, name, group_size).reshape(num_rows, -1),
            group_size,
        )


def _nibbles(quants: Tensor) -> Tensor:
    """Return low, then high nibbles of each run of bytes [..., n]: [..., 2 n]."""
    return torch.cat([quants & 15, quants >> 4], -1)


def _fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    """Return 16 for each of 32 elements whose bit is set in the 32 bits at `offset`, else 0."""
    words = blocks[:, offset : offset + 4].contiguous().view(torch.int32)
    return ((words >> torch.arange(32, dtype=torch.int32) & 1) * 16).to(torch.uint8)


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:].view(torch.int8), half(blocks, 0), None


def _q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:]).to(torch.int8) - 8, half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:]), half(blocks, 0), -half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Parts:
    return (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks, 2)).to(torch.int8) - 16, half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 8:]) + _fifth_bits(blocks, 4), half(blocks, 0), -half(blocks, 2)


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = scales_and_minima(blocks)
    return _nibbles(blocks[:, 16:].unflatten(1, (4, 32))), scales[..., 0], minima[..., 0]


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = scales_and_minima(blocks)
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    nibbles = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).reshape(-1, 8, 32)
    return nibbles + bits * 16, scales[..., 0], minima[..., 0]


def _q6_k(blocks: Tensor) -> _Parts:
    nibbles = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    values = (nibbles + upper * 16).to(torch.int8) - 32
    return values, half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:]), half(blocks, 0), None


def _mxfp4(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 1:]), power_of_two(blocks), None


# By the name of GGUF's type.
SPLITS = {
    "Q8_0": Split(("int8", 32), 34, _q8_0),
    "Q4_0": Split(("int4", 32), 18, _q4_0),
    "Q4_1": Split(("uint4", 32), 20, _q4_1),
    "Q5_0": Split(("int8", 32), 22, _q5_0),
    "Q5_1": Split(("int8_min", 32), 24, _q5_1),
    "Q4_K": Split(("uint4", 32), 144, _q4_k),
    "Q5_K": Split(("int8_min", 32), 176, _q5_k),
    "Q6_K": Split(("int8", 16), 210, _q6_k),
    "IQ4_NL": Split(("iq4_nl", 32), 18, _iq4_nl),
    "MXFP4": Split(("mxfp4", 32), 17, _mxfp4),
}


def common_format(formats: Sequence[QuantFormat]) -> QuantFormat | None:
    """Return a format for the quants of all: their own, or bytes in the smallest of their groups; None if none exists.

    Formats whose products do not round x are not mixed, nor are zeros or whole rows with other kinds of groups.
    """
    if len(set(formats)) == 1:
        return formats[0]
    if any(name in (*WIDENED, *WITH_ZEROS) or group_size == 0 for name, group_size in formats):
        return None
    name = "int8_min" if any(name in WITH_MINS for name, _ in formats) else "int8"
    return name, min(group_size for _, group_size in formats)


def in_format(weight: Quantized, format: QuantFormat) -> Quantized:
    """Return the same quants in a format that `common_format` returned for theirs."""
    name, group_size = format
    if (weight.name, weight.group_size) == format:
        return weight
    times = weight.group_size // group_size
    scales = weight.scales.repeat_interleave(times, 1)
    mins = None
    if name in WITH_MINS:
        mins = torch.zeros_like(scales) if weight.mins is None else weight.mins.repeat_interleave(times, 1)
    return Quantized(name, quants_of(weight).to(torch.int8), scales, mins, group_size, weight.columns)
