"""The description of packed weights that linears, experts and the pack cache share.

csrc/base/packed_weight.h has the same in C++, with the meaning of each name for a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty_in_huge_pages
from tilewright.ops.quantized import (
    NAMES,
    ROTATED,
    WITH_MINS,
    WITH_STEPS,
    Quantized,
    group_sizes,
    quantize,
    rotated_length,
    scale_dtype,
    values_dtype,
)

# The formats that `quantize` and `auto` choose: the native code takes a twentieth of torch's time for a large weight.
ROUNDED_NATIVELY = ("int8", "int8_rotated", "int4", "uint4", "int4_rotated")


@dataclass(frozen=True)
class WeightFormat:
    """Storage and layout of packed weights: all that a kernel needs to read them."""

    name: str  # of the values: bfloat16, float32 or one of ops.quantized.NAMES
    layout: str
    group_size: int = 0  # quants of a row that share a scale; 0: the whole row

    def __str__(self) -> str:
        return f"{self.name} in groups of {self.group_size}" if self.group_size else self.name

    @property
    def is_quantized(self) -> bool:
        return self.name in NAMES

    @property
    def has_mins(self) -> bool:
        return self.name in WITH_MINS

    @property
    def is_rotated(self) -> bool:
        return self.name in ROTATED

    @property
    def has_steps(self) -> bool:
        return self.name in WITH_STEPS

    @property
    def storage(self) -> torch.dtype:
        """Element type of the packed data."""
        return torch.uint8 if self.is_quantized else getattr(torch, self.name)


def weight_format(dtype: torch.dtype | str, group_size: int = 0) -> WeightFormat:
    """Return the packed format of `dtype`, a type or a quantised format's name, for the active backend and ISA."""
    name = str(dtype).removeprefix("torch.")
    if isinstance(dtype, str) and dtype not in NAMES:
        raise ValueError(f"the weight's format is {dtype!r}, expected one of {', '.join(NAMES)}")
    known = group_sizes(name) if name in NAMES else ()
    if group_size not in (known or (0,)):
        expected = ", ".join(map(str, known)) or "none"
        raise ValueError(f"{name} has no groups of {group_size} values, expected {expected}")
    return WeightFormat(name, packed_layout(name), group_size)


@op
def packed_layout(name: str) -> str:
    """Return the layout of packed weights in a format."""
    return kernels.packed_layout(name)


@dataclass(frozen=True)
class PackedForm:
    """All but the bytes of a packed weight [n, k]."""

    format: WeightFormat
    n: int
    k: int
    gated: bool = False  # rows are gate then up, equally many: a product gives act(gate) * up, n / 2 columns

    @property
    def num_quants(self) -> int:
        """Quants of a row before packing."""
        return rotated_length(self.k) if self.format.is_rotated else self.k

    @property
    def num_elements(self) -> int:
        return packed_elements(self)

    @property
    def num_scales(self) -> int:
        return packed_scales(self)

    @property
    def num_groups(self) -> int:
        return -(-self.num_quants // (self.format.group_size or self.num_quants))

    @property
    def _scale_dtype(self) -> torch.dtype:
        """Type of the scales; bytes for scales and steps together, if the format has steps."""
        return torch.uint8 if self.format.has_steps else scale_dtype(self.format.name, self.format.group_size)

    def allocate(self, *leading: int) -> tuple[Tensor, Tensor | None]:
        """Allocate the data and the scales of a weight, or of several in `leading` axes."""
        data = empty_in_huge_pages(math.prod(leading) * self.num_elements, self.format.storage)
        if not self.format.is_quantized:
            return data.view(*leading, -1), None
        scales = empty_in_huge_pages(math.prod(leading) * self.num_scales, self._scale_dtype)
        return data.view(*leading, -1), scales.view(*leading, -1)


@op
def packed_elements(form: PackedForm) -> int:
    """Return the number of elements of a packed weight, including padding to whole tiles."""
    return kernels.packed_elements(form)


@op
def packed_scales(form: PackedForm) -> int:
    """Return the number of scales, with mins if it has them, or the bytes of scales and steps; 0: not quantised."""
    return kernels.packed_scales(form)


@dataclass(frozen=True)
class Packed:
    """Weights of one form, with all that is needed to use them."""

    data: Tensor  # [elements of the form], or a row of them for each expert
    form: PackedForm
    scales: Tensor | None = None  # of quantised formats, with the mins if there are any
    row_dtype: torch.dtype = torch.float32  # of quantised formats: type of unpacked rows

    @property
    def n(self) -> int:
        return self.form.n

    @property
    def k(self) -> int:
        return self.form.k

    @property
    def gated(self) -> bool:
        return self.form.gated

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values, or of unpacked quantised ones."""
        return self.row_dtype if self.form.format.is_quantized else self.data.dtype

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def native(self) -> tuple[object, PackedForm, object]:
        """Return the weight as the kernels' single argument."""
        return view(self.data), self.form, view_or_none(self.scales)


def pack_into(weight: Tensor | Quantized, packed: Packed) -> None:
    """Write `weight` [n, k], fp32, bf16 or quantised, into `packed` in its form.

    A tensor is quantised if the form is; a quantised weight must have the form's format.
    """
    own = packed.form.format
    if own.is_quantized and isinstance(weight, Tensor):
        weight = rounded(weight, own)
    if isinstance(weight, Tensor):
        return pack_values(weight, packed)
    if (weight.name, weight.group_size) != (own.name, own.group_size):
        raise ValueError(
            f"pack_weight: the weight is {weight.name} in groups of {weight.group_size}, "
            f"expected {own.name} in groups of {own.group_size}"
        )
    pack_quantized(weight, packed)


def rounded(weight: Tensor, format: WeightFormat) -> Quantized:
    """Return `weight` [n, k], fp32 or bf16, as quants of a quantised format, equal for both backends."""
    if format.name not in ROUNDED_NATIVELY or weight.device.type != "cpu":
        return quantize(weight, format.name, format.group_size)
    return _rounded_natively(weight, format)


def _rounded_natively(weight: Tensor, format: WeightFormat) -> Quantized:
    n, k = weight.shape
    form = PackedForm(replace(format, layout=kernels.packed_layout(format.name)), n, k)
    values = torch.empty(n, form.num_quants, dtype=values_dtype(format.name))
    num_scales = 1 if format.has_steps else form.num_groups
    scales = torch.empty(n, num_scales, dtype=scale_dtype(format.name, format.group_size))
    mins = torch.empty_like(scales) if format.has_mins else None
    steps = torch.empty(n, 2 * form.num_groups, dtype=torch.uint8) if format.has_steps else None
    given = view_or_none(mins), view_or_none(steps)
    kernels.quantize(view(weight), form, view(values.view(torch.uint8)), view(scales), *given)
    for kept in (scales, mins):
        if kept is not None and not bool(kept.isfinite().all()):
            most = weight.abs().max().item()
            raise ValueError(f"a scale of values up to {most:.3g} cannot be kept as {kept.dtype}")
    own_k = k if format.is_rotated else None
    own_steps = None if steps is None else steps.view(torch.int8)
    return Quantized(format.name, values, scales, mins, format.group_size, k=own_k, steps=own_steps)


@op
def pack_values(weight: Tensor, packed: Packed) -> None:
    """Pack a tensor into a form that is not quantised."""
    kernels.pack_weight(view(weight), packed.native())


@op
def pack_quantized(weight: Quantized, packed: Packed) -> None:
    """Pack a weight that is quantised already."""
    values = view(weight.values.view(torch.uint8))
    steps = None if weight.steps is None else view(weight.steps.view(torch.uint8))
    kernels.pack_quantized(values, view(weight.scales), view_or_none(weight.mins), steps, packed.native())


@op
def unpacked(packed: Packed) -> Tensor:
    """Return the weight [n, k] as it was before packing, or as it was rounded."""
    weight = torch.empty(packed.n, packed.k, dtype=packed.dtype)
    kernels.unpack_weight(packed.native(), view(weight))
    return weight
