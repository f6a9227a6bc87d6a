"""Mixture of experts: routes tokens to experts, and computes the experts in one call; kernels in csrc/kernels/moe.

T tokens, E experts, k chosen per token, D model width, I inner width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.linear import PackedWeight
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.packed import Packed, PackedForm, WeightFormat, pack_into, weight_format
from tilewright.ops.plan import empty
from tilewright.ops.quantized import Quantized


@dataclass(frozen=True)
class PackedExperts(Packed):
    """Weights [n, k] of all experts, one row of `data` per expert, each in the layout of a PackedWeight."""

    @classmethod
    def empty(cls, num_experts: int, n: int, k: int, gated: bool, dtype: torch.dtype | WeightFormat) -> PackedExperts:
        """Allocate the experts, to be filled by `pack`; memory is used only as they are packed."""
        if num_experts < 1 or n < 1 or k < 1 or (gated and n % 2):
            what = "gate|up experts of an even n" if gated else "experts"
            raise ValueError(f"PackedExperts: {num_experts} experts of {n} x {k}, expected 1 or more {what}")
        form = PackedForm(dtype if isinstance(dtype, WeightFormat) else weight_format(dtype), n, k, gated)
        data, scales = form.allocate(num_experts)
        return cls(data, form, scales)

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    def pack(self, expert: int, weight: Tensor | Quantized) -> None:
        """Pack `weight` [n, k] of one expert into its place."""
        if weight.shape != (self.n, self.k):
            raise ValueError(f"PackedExperts: weight has shape {list(weight.shape)}, expected [n={self.n}, k={self.k}]")
        if isinstance(weight, Quantized) and weight.columns is not None:
            raise ValueError("PackedExperts: the weight's columns are not in order")
        pack_into(weight, self.expert(expert))

    def expert(self, expert: int) -> PackedWeight:
        """Return one expert's weight for `linear`, sharing memory."""
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"PackedExperts: expert is {expert}, expected 0 to {self.num_experts - 1}")
        scales = None if self.scales is None else self.scales[expert]
        return PackedWeight(self.data[expert], self.form, scales, self.row_dtype)


@op
def route(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scoring: str = "softmax",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights fp32 [T, k] of the k largest of logits [T, E], best first, lower ids first if equal.

    A weight is the softmax over all E logits, or the sigmoid of its own (`scoring`), in fp32; with `renormalize` the k
    weights of a token are divided by their sum. `out` is the pair to write to.
    """
    if out is None:
        shape = (logits.shape[0], top_k)
        out = empty(shape, torch.int32), empty(shape, torch.float32)
    ids, weights = out
    if ids.shape[-1] != top_k:
        raise ValueError(f"route: out has {ids.shape[-1]} experts per token, expected top_k={top_k}")
    kernels.route(view(logits), view(ids), view(weights), renormalize, scoring)
    return ids, weights


@op
def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the sum over a token's experts of weight * down(activation(gate) * up), + residual: [T, D] for x [T, D].

    ids int32 and weights fp32 [T, k] are those of `route`. gate_up is gated, [2I, D] per expert, down [D, I].
    `residual` has the shape and type of the result and may be `out`. Products are those of `linear`; the experts'
    outputs are fp32 and added in the order of ids, so a token's bits do not depend on the other tokens.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.moe(
        view(x),
        view(ids),
        view(weights),
        gate_up.native(),
        down.native(),
        activation,
        view_or_none(residual),
        view(out),
    )
    return out
