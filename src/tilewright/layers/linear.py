"""Products with weights: the only calls of the linear and expert kernels in layers and models.

A product chooses the format of the packed weight, the epilogue, and the collective if it is split over ranks
(layers/partition.py). Adapters belong here too: models do not change for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.layers import partition, precision
from tilewright.layers.norm import RmsNorm
from tilewright.ops.linear import PackedWeight, linear
from tilewright.ops.moe import moe
from tilewright.ops.plan import empty
from tilewright.parallel.group import Group, refuse_recording
from tilewright.weights.linear import ExpertStorage, ExpertsWeight, LinearPart, LinearWeight, PatchWeight
from tilewright.weights.spec import Shard, Weight, along


class Linear:
    """x W^T + b. The parts of a fused projection (q, k and v; gate and up) are one product.

    With `column_shard`, x is this rank's part of the inputs, and the products of all ranks are summed. The last
    `num_exact` parts are never quantised: beside quantised ones they are a separate product.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int] | tuple[str, int, Shard]],
        columns: int,
        *,
        column_shard: Shard | None = None,
        bias: bool = False,
        gated: bool = False,
        tanh_scale: str | None = None,
        row_scale: str | None = None,
        num_exact: int = 0,
    ) -> None:
        """Describe the weight as in `LinearWeight`; parts are (name in the checkpoint, rows, this rank's shard)."""
        own, quantized_as = partition.current(), precision.current().products
        self._group = own.group if own.is_split and column_shard is not None else None
        first_exact = len(parts) - num_exact if quantized_as is not None else len(parts)

        def weight_of(some: Sequence[tuple[str, int] | tuple[str, int, Shard]], is_exact: bool) -> LinearWeight:
            return LinearWeight(
                some,
                columns,
                column_shard=column_shard,
                bias=bias,
                bias_shard=None if self._group is None else own.on_first_rank(parts[0][1]),
                gated=gated,
                tanh_scale=tanh_scale,
                row_scale=row_scale,
                quantized_as=None if is_exact else quantized_as,
            )

        self.weight: Weight[PackedWeight] = weight_of(parts[:first_exact] or parts, first_exact == 0)
        self.exact: Weight[PackedWeight] | None = None
        if 0 < first_exact < len(parts):
            assert self._group is None and not gated, "parts of a sum, or of gate and up, are in one format"
            self.exact = weight_of(parts[first_exact:], True)

    @property
    def packed(self) -> PackedWeight:
        """The loaded weight in the kernels' format."""
        assert self.exact is None, "the weight is two"
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
        """Return activation(x W^T + b) + residual for x [..., K], or activation(gate) * up + residual if gated."""
        weight = self.weight.value
        if self.exact is not None:
            assert residual is None and out is None, "a product in two parts is not added to anything"
            rest, n = self.exact.value, weight.out_features
            out = empty((*x.shape[:-1], n + rest.out_features), out_dtype or x.dtype)
            linear(x, weight, activation=activation, out=out[..., :n])
            linear(x, rest, activation=activation, out=out[..., n:])
            return out
        if self._group is None:
            return _multiply(x, weight, activation, residual, out, out_dtype)
        assert activation == "none", "an activation of a sum that is not complete"
        partial = linear(x, weight, out_dtype=torch.float32)
        return add_up(self._group, partial, residual, out, out_dtype or x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> Tensor:
        """Add x W^T + b to the residual, and return norm(residual)."""
        if self._group is None:
            return norm(self(x, residual=residual, out=residual))
        partial = linear(x, self.weight.value, out_dtype=torch.float32)
        return self._group.all_reduce_norm(
            partial, residual, norm.weight.value, norm.eps, weight_plus_one=norm.plus_one
        )


def _multiply(
    x: Tensor,
    weight: PackedWeight,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Return `ops.linear.linear`, for a weight that may have several pieces, each in its own format."""
    if weight.next is None:
        return linear(x, weight, activation=activation, residual=residual, out=out, out_dtype=out_dtype)
    pieces = [weight]
    while (following := pieces[-1].next) is not None:
        pieces.append(following)
    if out is None:
        out = empty((*x.shape[:-1], sum(piece.out_features for piece in pieces)), out_dtype or x.dtype)
    begin = 0
    for piece in pieces:
        end = begin + piece.out_features
        own_residual = None if residual is None else residual[..., begin:end]
        linear(x, piece, activation=activation, residual=own_residual, out=out[..., begin:end])
        begin = end
    return out


def add_up(group: Group, partial: Tensor, residual: Tensor | None, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of all ranks' fp32 partial sums and the residual, rounded once."""
    if out is None:
        out = empty(tuple(partial.shape), dtype)
    if residual is not None:
        return group.all_reduce_add(partial, residual, out=out)
    refuse_recording("a sum over ranks that is added to nothing")  # only encoders do this, which are not recorded
    return out.copy_(group.all_reduce(partial))


class GatheredLinear:
    """x W^T + b of which each rank computes some columns; all ranks get the whole result."""

    def __init__(self, weight: Weight[PackedWeight], width: int, shard: Shard) -> None:
        """Take a `weight` with the rows `shard` of `width`."""
        self.weight = weight
        self.width = width
        self._shard = shard
        self._group = partition.current().group

    @classmethod
    def named(
        cls, name: str, width: int, columns: int, *, what: str, bias: bool = False, is_head: bool = False
    ) -> GatheredLinear:
        """Return the linear of a checkpoint's weight [width, columns]; `what` names it in the warning about padding."""
        shard = partition.current().width(what, width)
        formats = precision.current()
        quantized_as = formats.head if is_head else formats.products
        weight = LinearWeight([LinearPart(name, width, shard)], columns, bias=bias, quantized_as=quantized_as)
        return cls(weight, width, shard)

    @property
    def packed(self) -> PackedWeight:
        """Rows of the loaded weight that this rank has."""
        return self.weight.value

    def __call__(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return x W^T + b + residual [N, width] for x [N, K]."""
        return gathered(self._group, x, self.weight.value, self._shard, self.width, residual, out, out_dtype)


def gathered(
    group: Group,
    x: Tensor,
    weight: PackedWeight,
    shard: Shard,
    width: int,
    residual: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Return x W^T + b + residual, of which this rank computes the columns `shard`."""
    if group.size == 1:
        return linear(x, weight, residual=residual, out=out, out_dtype=out_dtype)
    own_residual = None if residual is None else along(residual, 1, shard)
    if out is None:
        out = empty((len(x), width), out_dtype or x.dtype)
    part = linear(x, weight, residual=own_residual, out_dtype=out.dtype)
    return group.all_gather(part, dim=-1, out=out)


class PatchEmbedding:
    """A Conv3d over patches, with stride equal to its kernel, as a product; for stills the kernel is summed."""

    def __init__(self, name: str, shape: tuple[int, int, int, int, int], *, bias: bool = True) -> None:
        own = partition.current()
        self.width = shape[0]
        self._shard, self._group = own.width("patch embedding", self.width), own.group
        self.weight = PatchWeight(name, shape, self._shard, bias=bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.value.still.dtype

    def __call__(self, patches: Tensor, *, is_still: bool, out: Tensor, residual: Tensor | None = None) -> Tensor:
        weights = self.weight.value
        weight = weights.still if is_still else weights.video
        return gathered(self._group, patches, weight, self._shard, self.width, residual, out, None)


class Experts:
    """Sum over a token's experts of weight * down(act(gate) * up). Each rank has a part of every expert's width."""

    def __init__(self, name: str, num_experts: int, width: int, inner_width: int, stored: ExpertStorage) -> None:
        own = partition.current()
        self._group = own.group if own.is_split else None
        shard = own.width("expert width", inner_width)
        parts, quantized_as = ("gate_proj", "up_proj"), precision.current().products
        self.gate_up = ExpertsWeight(
            name,
            parts,
            "gate_up_proj",
            num_experts,
            2 * inner_width,
            width,
            stored,
            part_shard=shard,
            quantized_as=quantized_as,
        )
        self.down = ExpertsWeight(
            name,
            ("down_proj",),
            "down_proj",
            num_experts,
            width,
            inner_width,
            stored,
            column_shard=shard,
            quantized_as=quantized_as,
        )

    def __call__(
        self, x_TD: Tensor, ids: Tensor, weights: Tensor, *, activation: str, residual: Tensor, out: Tensor
    ) -> Tensor:
        """Return the result for ids and weights [T, k] from `ops.moe.route`."""
        gate_up, down = self.gate_up.value, self.down.value
        if self._group is None:
            return moe(x_TD, ids, weights, gate_up, down, activation=activation, residual=residual, out=out)
        partial = empty(tuple(x_TD.shape), torch.float32)
        moe(x_TD, ids, weights, gate_up, down, activation=activation, out=partial)
        return add_up(self._group, partial, residual, out, out.dtype)
