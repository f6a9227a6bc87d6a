"""What a packed weight is: the description that linears, experts and the pack cache share.

The same in C++ is csrc/base/packed_weight.h, which says what each name means to a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none


@dataclass(frozen=True)
class WeightFormat:
    """How the values of packed weights are stored and how they lie: what a kernel must know to read any of them."""

    name: str  # of the values: bfloat16 or float32
    layout: str
    group_size: int = 0  # values of a row that share a scale; 0: the format has no scales


@op
def weight_format(dtype: torch.dtype) -> WeightFormat:
    """The format in which weights of a model in `dtype` are packed for the backend, and the ISA level, in use."""
    return WeightFormat(str(dtype).removeprefix("torch."), kernels.packed_layout())


@dataclass(frozen=True)
class PackedForm:
    """A weight [n, k] as it is packed: everything but its bytes."""

    format: WeightFormat
    n: int
    k: int
    gated: bool = False  # the rows are gate then up, as many of each: a product gives act(gate) * up, n / 2 columns

    @property
    def num_elements(self) -> int:
        return packed_elements(self)


@op
def packed_elements(form: PackedForm) -> int:
    """How many elements a weight of a form has, those that fill up its last tiles included."""
    return kernels.packed_elements(form)


@dataclass(frozen=True)
class Packed:
    """Weights of one form, with all that is needed to use them: nobody has to remember how they were packed."""

    data: Tensor  # [elements of the form], or a row of them for each expert
    form: PackedForm
    scales: Tensor | None = None  # of formats with groups

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
        return self.data.dtype

    def native(self) -> tuple[object, PackedForm, object]:
        """The one argument as which kernels take it."""
        return view(self.data), self.form, view_or_none(self.scales)


@op
def pack_into(weight: Tensor, packed: Packed) -> None:
    """Writes `weight` [n, k], fp32 or bf16, to where `packed` has its data, as its form says."""
    kernels.pack_weight(view(weight), packed.native())


@op
def unpacked(packed: Packed) -> Tensor:
    """The weight [n, k] as it came."""
    weight = torch.empty(packed.n, packed.k, dtype=packed.dtype)
    kernels.unpack_weight(packed.native(), view(weight))
    return weight
