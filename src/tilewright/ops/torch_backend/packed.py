"""Packed weights of the torch backend: rows in their original order."""

import torch
from torch import Tensor

from tilewright.ops.packed import Packed, PackedForm
from tilewright.ops.quantized import Quantized, dequantize, values_dtype

LAYOUT = "rows"


def packed_layout(name: str) -> str:
    return LAYOUT


def packed_elements(form: PackedForm) -> int:
    return form.n * form.num_quants


def packed_scales(form: PackedForm) -> int:
    if not form.format.is_quantized:
        return 0
    if form.format.has_steps:
        return form.n * (4 + 2 * form.num_groups)
    return form.n * form.num_groups * (2 if form.format.has_mins else 1)


def pack_values(weight: Tensor, packed: Packed) -> None:
    rows_of(packed).copy_(weight)


def pack_quantized(weight: Quantized, packed: Packed) -> None:
    own = quantized_of(packed)
    own.values.copy_(weight.values)
    own.scales.copy_(weight.scales)
    if own.mins is not None and weight.mins is not None:
        own.mins.copy_(weight.mins)
    if own.steps is not None and weight.steps is not None:
        own.steps.copy_(weight.steps)


def unpacked(packed: Packed) -> Tensor:
    if packed.form.format.is_quantized:
        return dequantize(quantized_of(packed)).to(packed.dtype)
    return rows_of(packed).clone()


def quantized_of(packed: Packed) -> Quantized:
    """Return the quants, scales and mins of a quantised weight, without a copy."""
    own = packed.form.format
    assert packed.scales is not None
    values = rows_of(packed).view(values_dtype(own.name))
    k = packed.k if own.is_rotated else None
    if own.has_steps:
        scales, steps = packed.scales.split([4 * packed.n, 2 * packed.n * packed.form.num_groups], -1)
        scales = scales.view(torch.float32).unflatten(-1, (packed.n, 1))
        steps = steps.view(torch.int8).unflatten(-1, (packed.n, -1))
        return Quantized(own.name, values, scales, None, own.group_size, k=k, steps=steps)
    if not own.has_mins:
        return Quantized(own.name, values, packed.scales.unflatten(-1, (packed.n, -1)), None, own.group_size, k=k)
    scales, mins = packed.scales.unflatten(-1, (2, packed.n, -1)).unbind(-3)
    return Quantized(own.name, values, scales, mins, own.group_size)


def rows_of(packed: Packed) -> Tensor:
    """Return [n, k], or [E, n, k] for experts, without a copy; rotated rows may have more quants."""
    layout = packed.form.format.layout
    if layout != LAYOUT:
        raise ValueError(f"the weight has layout {layout!r}, expected {LAYOUT!r}: it was packed for the native backend")
    return packed.data.unflatten(-1, (packed.n, packed.form.num_quants))
