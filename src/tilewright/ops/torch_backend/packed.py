"""Weights as they came: row after row."""

import torch
from torch import Tensor

from tilewright.ops.packed import Packed, PackedForm, WeightFormat

LAYOUT = "rows"


def weight_format(dtype: torch.dtype) -> WeightFormat:
    return WeightFormat(str(dtype).removeprefix("torch."), LAYOUT)


def packed_elements(form: PackedForm) -> int:
    return form.n * form.k


def pack_into(weight: Tensor, packed: Packed) -> None:
    rows_of(packed).copy_(weight)


def unpacked(packed: Packed) -> Tensor:
    return rows_of(packed).clone()


def rows_of(packed: Packed) -> Tensor:
    """[n, k], or [E, n, k] of experts, as they lie, without a copy."""
    layout = packed.form.format.layout
    if layout != LAYOUT:
        raise ValueError(f"the weight has layout {layout!r}, expected {LAYOUT!r}: it was packed for the native backend")
    return packed.data.unflatten(-1, (packed.n, packed.k))
