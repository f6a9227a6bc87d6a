"""Where a layer multiplies by a weight: nothing else in layers and models calls the linear and expert kernels.

What a product needs besides its inputs is decided here: the format of the packed weight and the epilogue. Splitting
over ranks, the collective that follows it and adapters belong here too: models do not change for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.linear import PackedWeight, linear
from tilewright.ops.moe import moe
from tilewright.weights.experts import ExpertFormat, ExpertsWeight
from tilewright.weights.linear import LinearWeight, PatchWeight
from tilewright.weights.spec import Weight


class Linear:
    """x W^T + b. The parts of a fused projection (q, k and v; gate and up) are one product."""

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        *,
        bias: bool = False,
        gated: bool = False,
        tanh_scale: str | None = None,
    ) -> None:
        """As `LinearWeight`: parts are (name in the checkpoint, rows)."""
        self.weight: Weight[PackedWeight] = LinearWeight(parts, columns, bias=bias, gated=gated, tanh_scale=tanh_scale)

    @classmethod
    def of(cls, weight: Weight[PackedWeight]) -> Linear:
        """The product with a weight that is put together in a way of its own."""
        layer = cls.__new__(cls)
        layer.weight = weight
        return layer

    @property
    def packed(self) -> PackedWeight:
        """The weight as the kernels read it, once it is loaded."""
        return self.weight.value

    def __call__(
        self,
        x: Tensor,
        *,
        activation: str = "none",
        residual: Tensor | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """activation(x W^T + b) + residual for x [..., K]; of a gated weight activation(gate) * up + residual."""
        return linear(x, self.weight.value, activation=activation, residual=residual, out=out, out_dtype=out_dtype)


class PatchEmbedding:
    """A Conv3d over patches, whose stride is its kernel, as a product; stills have a kernel summed over time."""

    def __init__(self, name: str, shape: tuple[int, int, int, int, int]) -> None:
        self.weight = PatchWeight(name, shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.value.still.dtype

    def __call__(self, patches: Tensor, *, is_still: bool, residual: Tensor, out: Tensor) -> Tensor:
        weights = self.weight.value
        return linear(patches, weights.still if is_still else weights.video, residual=residual, out=out)


class Experts:
    """The sum over a token's experts of weight * down(act(gate) * up)."""

    def __init__(self, name: str, num_experts: int, width: int, inner_width: int, stored: ExpertFormat) -> None:
        self.gate_up = ExpertsWeight(
            name, ("gate_proj", "up_proj"), "gate_up_proj", num_experts, 2 * inner_width, width, stored
        )
        self.down = ExpertsWeight(name, ("down_proj",), "down_proj", num_experts, width, inner_width, stored)

    def __call__(
        self, x_TD: Tensor, ids: Tensor, weights: Tensor, *, activation: str, residual: Tensor, out: Tensor
    ) -> Tensor:
        """ids and weights [T, k] as `ops.moe.route` gives them."""
        return moe(
            x_TD,
            ids,
            weights,
            self.gate_up.value,
            self.down.value,
            activation=activation,
            residual=residual,
            out=out,
        )
