"""Weights as quants (integers of 4 or 8 bits, or fp8) in plain torch: rounding, and the values of quants.

A quant q stands for scale * q, in formats with mins for scale * q - min, in those with zeros for scale * (q - zero);
scale, min and zero are those of its group in the row. Scales and mins of groups are fp16, those of whole rows and of
fp8 and int8_exact fp32: quants are chosen for the scale as stored. csrc/base/packed_weight.h has the same formats.
Products round x by `quantize_rows` (csrc/kernels/linear/quantized.h), except those of `WIDENED` formats (widened.h
beside it).

In formats with steps q stands for scale * (base + step * q), with one fp32 scale per row, and an integer step and base
per group, so that products are of bytes. Rows of `ROTATED` formats are rotated before they are rounded, and x is for
the product: an outlier, which would make the steps of a whole row coarse, is spread over up to 256 values
(csrc/base/rotate.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The name of a quantised format, and how many values of a row share a scale, 0 for all of them.
QuantFormat = tuple[str, int]

NAMES = (
    "fp8",
    "int8_exact",
    "int8",
    "int8_min",
    "int8_rotated",
    "int4",
    "uint4",
    "uint4_zero",
    "mxfp4",
    "iq4_nl",
    "int4_rotated",
)
WITH_ZEROS = ("uint4_zero",)
WITH_MINS = ("int8_min", "uint4", *WITH_ZEROS)  # zeros are stored in place of mins
WIDENED = ("fp8", "int8_exact")  # x is not rounded
WITH_STEPS = ("int4_rotated",)
ROTATED = ("int8_rotated", *WITH_STEPS)
# Values of the codes 0 to 15; those of mxfp4 are twice e2m1, so that all are integers.
TABLES = {
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
_UNSIGNED = ("fp8", "uint4", "uint4_zero", *TABLES, *WITH_STEPS)
_FP8_MAX = 448.0
GROUP_SIZES = (16, 32, 64, 128, 256)
# Rows are rotated in their length padded to tiles, in parts of a power of two up to _MOST_ROTATED.
_TILE_DEPTH, _MOST_ROTATED = 64, 256

# A group with smaller values counts as zeros: 127 / max would overflow.
LEAST_MAX = 1e-30
# Positions, in quants, tried for the largest value of a group of int4; beyond -8 it is clipped, which may bring the
# others nearer. The error of the best of five is 9 % below that of the first alone, for normally distributed values.
_INT4_PLACES = (8.0, 7.6, 7.2, 6.8, 9.0)
# Fractions of the range of a group of uint4 that are tried. Each is then fitted to its quants _NUM_FITS times; together
# that reduces the squared error by 15 % for normal and Laplace distributions.
_UINT4_PARTS, _NUM_FITS = (1.0, 0.9, 0.82), 2
# Number of whole steps tried, from the one that covers all of a group.
_NUM_STEPS = 4


@dataclass(frozen=True)
class Quantized:
    """A weight [n, k] as quants and scales. `group_size`: values of a row that share a scale; 0: the whole row."""

    name: str
    values: Tensor  # [n, k], int8; uint8 of quants without a sign, codes of tables and bits of fp8; if rotated, wider
    scales: Tensor  # [n, groups]
    mins: Tensor | None = None  # or zeros
    group_size: int = 0
    columns: Tensor | None = None  # int32 [k]: the weight's column of each, if they are not in order
    k: int | None = None  # number of values in a row, if rotation has padded it to more quants
    steps: Tensor | None = None  # int8 [n, 2 * groups]: steps, then bases; scales are then [n, 1]

    @property
    def scale_group(self) -> int:
        """Quants (`quants_of`) of a row that share a scale, as do values of x; 0: the whole row."""
        return 0 if self.steps is not None else self.group_size

    @property
    def shape(self) -> torch.Size:
        """Shape [n, k] of the weight."""
        return self.values.shape if self.k is None else torch.Size((len(self.values), self.k))


def quantize(weight: Tensor, name: str, group_size: int = 0) -> Quantized:
    """Return `weight` [n, k], fp32 or bf16, in the named format."""
    k = weight.shape[1]
    if name in WITH_STEPS:
        return _in_steps(_turned(weight), name, group_size, k)
    num_quants = rotated_length(k) if name in ROTATED else k
    grouped = in_groups(_turned(weight) if name in ROTATED else weight.float(), group_size)
    mins: Tensor | None = None

    def stored(scales: Tensor) -> Tensor:
        return stored_scale(scales, name, group_size)

    if name in ("int8", "int8_exact", "int8_rotated"):
        scales = stored(grouped.abs().amax(-1) / 127)
        quants = (grouped * _inverse(scales)).round().clamp(-127, 127)
    elif name == "fp8":
        scales = stored(grouped.abs().amax(-1) / _FP8_MAX)
        quants = (grouped * _inverse(scales)).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    elif name == "int4":
        scales, quants = _int4(grouped, group_size)
    elif name in TABLES:
        scales = stored(_table_scales(grouped, name))
        quants = _nearest(grouped * _inverse(scales), name)
    elif name in WITH_ZEROS:
        least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = stored((most - least) / 15)
        mins = stored((-least[..., None] * _inverse(scales)).round()[..., 0])
        quants = ((grouped * _inverse(scales)).round() + mins.float()[..., None]).clamp(0, 15)
    elif name == "uint4":
        scales, mins, quants = _uint4(grouped, group_size)
    elif name == "int8_min":
        least, most = grouped.amin(-1), grouped.amax(-1)
        scales = stored((most - least) / 254)
        mins = stored(-127 * scales.float() - least)
        quants = ((grouped + mins.float()[..., None]) * _inverse(scales)).round().clamp(-127, 127)
    else:
        raise ValueError(f"the format is {name!r}, expected one of {', '.join(NAMES)}")
    values = quants.to(values_dtype(name)).flatten(1)[:, :num_quants].contiguous()
    return Quantized(name, values, scales, mins, group_size, k=k if name in ROTATED else None)


def rotated_length(k: int) -> int:
    """Return the length of a rotated row of k values."""
    return -(-k // _TILE_DEPTH) * _TILE_DEPTH


def rotate(x: Tensor) -> Tensor:
    """Return x [..., k] rotated, as fp32 [..., `rotated_length`], padded with zeros.

    Pairs of columns at a distance are added and subtracted, then pairs of pairs and so on. Rotating twice gives x times
    the size of the rotation.
    """
    length = rotated_length(x.shape[-1])
    rows = torch.nn.functional.pad(x.float(), (0, length - x.shape[-1])).view(-1, length)
    apart = length // _rotation_size(length)
    while apart < length:
        one, other = rows.view(len(rows), -1, 2, apart).unbind(2)
        rows = torch.stack([one + other, one - other], 2).view(len(rows), length)
        apart *= 2
    return rows.view(*x.shape[:-1], length)


def _rotation_size(length: int) -> int:
    return min(length & -length, _MOST_ROTATED)


def _turned(weight: Tensor) -> Tensor:
    """Return a weight rotated so that its products with rotated x equal those of the originals."""
    return rotate(weight.float() / _rotation_size(rotated_length(weight.shape[-1])))


def values_dtype(name: str) -> torch.dtype:
    """Return the type of `Quantized.values`."""
    return torch.uint8 if name in _UNSIGNED else torch.int8


def _table_scales(grouped: Tensor, name: str) -> Tensor:
    """Return scales that map the value farthest from zero to the end of a table; for mxfp4 powers of two."""
    farthest = _farthest(grouped)
    if name == "iq4_nl":
        return farthest / TABLES[name][0]
    # The exponent of the largest value minus that of 12, the largest of the table.
    exponents = torch.frexp(farthest.abs())[1] - 4
    return torch.where(farthest == 0, 0.0, torch.exp2(exponents.float()))


def _nearest(values: Tensor, name: str) -> Tensor:
    """Return the codes of the entries of a table that are nearest to the values."""
    ordered = sorted((entry, code) for code, entry in enumerate(TABLES[name]))
    entries = torch.tensor([entry for entry, _ in ordered], dtype=torch.float32, device=values.device)
    codes = torch.tensor([code for _, code in ordered], dtype=torch.uint8, device=values.device)
    return codes[torch.bucketize(values, (entries[1:] + entries[:-1]) / 2)]


def _farthest(grouped: Tensor) -> Tensor:
    """Return the value of each group that is farthest from zero."""
    return grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]


class _Best:
    """Keeps the candidate with the least squared error per group: scales, mins if any, quants."""

    def __init__(self) -> None:
        self.error: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def update(self, error: Tensor, *parts: Tensor) -> None:
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
    """Return scales and quants with the least squared error among some quants for the value farthest from zero."""
    farthest = _farthest(grouped)
    best = _Best()
    for place in _INT4_PLACES:
        scales = stored_scale(farthest / -place, "int4", group_size)
        quants = (grouped * _inverse(scales)).round_().clamp_(-8, 7)
        error = torch.addcmul(grouped, quants, scales.float()[..., None], value=-1).square_().sum(-1)
        best.update(error, scales, quants)
    scales, quants = best.parts
    return scales, quants


def _uint4(grouped: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, mins and quants with the least squared error among fractions of the range, fitted to quants."""
    least, most = grouped.amin(-1), grouped.amax(-1)
    mean = grouped.mean(-1)
    best = _Best()
    for part in _UINT4_PARTS:
        cut = (most - least) * (0.5 - 0.5 * part)
        scale, low = (most - least) * (part / 15), least + cut
        for _ in range(1 + _NUM_FITS):
            scales, mins = stored_scale(scale, "uint4", group_size), stored_scale(-low, "uint4", group_size)
            quants = ((grouped + mins.float()[..., None]) * _inverse(scales)).round_().clamp_(0, 15)
            error = torch.addcmul(grouped + mins.float()[..., None], quants, scales.float()[..., None], value=-1)
            best.update(error.square_().sum(-1), scales, mins, quants)
            # Least-squares line through the quants; a group with a single quant keeps its own.
            centre = quants.mean(-1)
            apart = quants - centre[..., None]
            spread = apart.square().sum(-1)
            scale = torch.where(spread > 0, (apart * grouped).sum(-1) / spread.clamp(min=1e-20), scale)
            low = mean - scale * centre
    scales, mins, quants = best.parts
    return scales, mins, quants


def _in_steps(rotated: Tensor, name: str, group_size: int, k: int) -> Quantized:
    """Return steps and bases with the least squared error, in units of a scale that maps a row's extreme to 127."""
    scales = rotated.abs().amax(-1, keepdim=True) / 127
    grouped = in_groups(rotated * _inverse(scales[:, 0]), group_size)
    least, most, mean = grouped.amin(-1), grouped.amax(-1), grouped.mean(-1)
    widest = ((most - least) / 15).ceil()
    best = _Best()
    for less in range(_NUM_STEPS):
        step = (widest - less).clamp(min=1)
        base = (least + most) * 0.5 - 7.5 * step
        for _ in range(1 + _NUM_FITS):
            base = base.round().clamp(-127, 127)
            last = ((127 - base) / step).floor().clamp(max=15)  # the quant of the last byte
            quants = (grouped - base[..., None]) * (1 / step)[..., None]
            quants = torch.minimum(quants.clamp(min=0), last[..., None]).round()
            error = grouped - (quants * step[..., None] + base[..., None])
            best.update(error.square().sum(-1), step, base, quants)
            base = mean - step * quants.mean(-1)
    step, base, quants = best.parts
    steps = torch.cat([step, base], -1).to(torch.int8)
    return Quantized(name, quants.to(torch.uint8).flatten(1), scales, None, group_size, k=k, steps=steps)


def dequantize(weight: Quantized) -> Tensor:
    """Return the values that the quants stand for, fp32 [n, k], columns in order."""
    num_quants = weight.values.shape[1]
    grouped = in_groups(quants_of(weight), weight.scale_group) * weight.scales.float()[..., None]
    if (mins := mins_of(weight)) is not None:
        grouped = grouped - mins[..., None]
    found = grouped.flatten(1)[:, :num_quants]
    if weight.name in ROTATED:
        return rotate(found)[:, : weight.k]
    return found if weight.columns is None else torch.empty_like(found).index_copy_(1, weight.columns.long(), found)


def quants_of(weight: Quantized) -> Tensor:
    """Return the quants, fp32 [n, k]: `values`, decoded where they are codes of a table, bits of fp8 or have steps."""
    if weight.name == "fp8":
        return weight.values.view(torch.float8_e4m3fn).float()
    if weight.name in TABLES:
        table = torch.tensor(TABLES[weight.name], dtype=torch.float32, device=weight.values.device)
        return table[weight.values.int()]
    if weight.steps is not None:
        step, base = weight.steps.float().chunk(2, -1)
        grouped = in_groups(weight.values.float(), weight.group_size)
        return (grouped * step[..., None] + base[..., None]).flatten(-2)
    return weight.values.float()


def mins_of(weight: Quantized) -> Tensor | None:
    """Return what is subtracted from scale * q, fp32 [n, groups], or None."""
    if weight.mins is None:
        return None
    return weight.mins.float() * (weight.scales.float() if weight.name in WITH_ZEROS else 1.0)


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """Concatenate rows of one format."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if not all(same_columns(first, part) for part in parts):
        raise ValueError("rows of one product have their columns in different orders")
    mins = None if first.mins is None else torch.cat([part.mins for part in parts if part.mins is not None])
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    steps = None if first.steps is None else torch.cat([part.steps for part in parts if part.steps is not None])
    return Quantized(first.name, values, scales, mins, first.group_size, first.columns, first.k, steps)


def same_columns(one: Quantized, other: Quantized) -> bool:
    """Return whether two weights have their columns in the same order."""
    if one.columns is None or other.columns is None:
        return one.columns is other.columns
    return torch.equal(one.columns, other.columns)


def zeros_like(weight: Quantized, num_rows: int) -> Quantized:
    """Return rows of zeros in the format and width of another weight."""

    def zeros(part: Tensor) -> Tensor:
        return part.new_zeros(num_rows, part.shape[1])

    mins = None if weight.mins is None else zeros(weight.mins)
    values, scales = zeros(weight.values), zeros(weight.scales)
    steps = None if weight.steps is None else zeros(weight.steps)
    return Quantized(weight.name, values, scales, mins, weight.group_size, weight.columns, weight.k, steps)


def columns_of(weight: Quantized, runs: Sequence[tuple[int, int]]) -> Quantized:
    """Return runs (first, length) of the columns, whole groups of them; runs from a negative column on are zeros."""
    size = weight.group_size
    if list(runs) == [(0, weight.shape[1])]:
        return weight
    if weight.name in ROTATED:
        raise ValueError("its rows are rotated, which ranks cannot split: run it on one rank")
    if weight.columns is not None:
        raise ValueError("its columns are in the order of its groups, which ranks cannot split: run it on one rank")

    def cut(part: Tensor, unit: int) -> Tensor:
        pieces = [
            part.new_zeros(len(part), length // unit) if first < 0 else part.narrow(1, first // unit, length // unit)
            for first, length in runs
        ]
        return torch.cat(pieces, 1)

    if size == 0:
        return Quantized(weight.name, cut(weight.values, 1), weight.scales, weight.mins)
    for first, length in runs:
        if length % size or (first >= 0 and first % size):
            raise ValueError(f"columns {first} to {first + length} are not whole groups of {size}")
    mins = None if weight.mins is None else cut(weight.mins, size)
    return Quantized(weight.name, cut(weight.values, 1), cut(weight.scales, size), mins, size)


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return x [..., k] as products with quantised weights use it: integers [..., groups, size] in fp32, and scales.

    A NaN or an infinity makes the scale of its group a NaN.
    """
    grouped = in_groups(x.float(), group_size)
    most = grouped.abs().nan_to_num(0, torch.inf).amax(-1, keepdim=True)
    is_zero = ~(most > LEAST_MAX)
    # Not 127.0 / most, which torch computes as a reciprocal and a product: two roundings.
    inverse = torch.full_like(most, 127.0) / most
    quants = torch.where(is_zero, 0.0, (grouped * inverse).round())
    scales = torch.where(is_zero, 0.0, most / 127.0) + (grouped * 0).sum(-1, keepdim=True)
    return quants.nan_to_num(0, 0, 0), scales[..., 0]


def in_groups(x: Tensor, group_size: int) -> Tensor:
    """Return x [..., k] as [..., groups, size], the last group padded with zeros."""
    size = group_size or x.shape[-1]
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def group_sizes(name: str) -> tuple[int, ...]:
    """Return the group sizes that a format supports; 0: the whole row."""
    if name in WIDENED:
        return (0, *(size for size in GROUP_SIZES if size % 32 == 0))
    if name in WITH_STEPS:
        return tuple(size for size in GROUP_SIZES if size <= 32)
    if name in ROTATED:
        return (0,)
    return (0, *GROUP_SIZES) if name == "int8" else GROUP_SIZES


def scale_dtype(name: str, group_size: int) -> torch.dtype:
    """Return the type of `Quantized.scales`."""
    return torch.float16 if group_size and name not in (*WIDENED, *WITH_STEPS) else torch.float32


def stored_scale(scales: Tensor, name: str, group_size: int) -> Tensor:
    """Return scales or mins as stored. ValueError if one is too large for that, or NaN."""
    kept = scales.to(scale_dtype(name, group_size))
    if not kept.is_meta and not bool(kept.isfinite().all()):
        raise ValueError(f"a scale of {scales.abs().max().item():.3g} cannot be kept as {kept.dtype}")
    return kept


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()[..., None]
    return torch.where(wide == 0, 0.0, 1.0 / wide)
