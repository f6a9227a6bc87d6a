"""LayerNorm, RMSNorm and GroupNorm with their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.ops.norm import group_norm, group_norm_table, group_statistics, layer_norm, rms_norm
from tilewright.parallel.group import Group
from tilewright.weights.conv import Unpacked
from tilewright.weights.spec import Shard


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis."""

    def __init__(self, name: str, width: int, eps: float, *, bias: bool = True) -> None:
        self.eps = eps
        self.weight = Unpacked(f"{name}.weight", width)
        self.bias = Unpacked(f"{name}.bias", width) if bias else None

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return layer_norm(x, self.weight.value, self.bias.value if self.bias else None, self.eps, out=out)


# Rows scaled at a time: their fp32 copies stay in a core's cache.
BLOCK_ROWS = 256


@dataclass(frozen=True)
class NormConfig:
    eps: float
    plus_one: bool = False  # scales by 1 + weight


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; `plus_one`: times 1 + weight."""

    def __init__(self, name: str, width: int, eps: float, *, plus_one: bool = False) -> None:
        self.eps, self.plus_one = eps, plus_one
        self.weight = Unpacked(f"{name}.weight", width)

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight.value, self.eps, weight_plus_one=self.plus_one, out=out)


class SplitRmsNorm:
    """RMSNorm of rows [T, width] of which each rank has the columns `shard`: a norm over heads that are split."""

    def __init__(self, name: str, width: int, eps: float, shard: Shard) -> None:
        self.width, self.eps = width, eps
        self.weight = Unpacked(f"{name}.weight", width, shard=shard)
        own = partition.current()
        self._group = own.group if own.is_split else None

    def normed_in_place(self, x: Tensor) -> None:
        if self._group is None:
            rms_norm(x, self.weight.value, self.eps, out=x)
        else:
            scale_rows(x, self.weight.value.float(), self._scales(x, self._group))

    def _scales(self, x: Tensor, group: Group) -> Tensor:
        """Return 1 / sqrt(mean(x^2) + eps) of each whole row; ranks sum one number per row."""
        squares = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).square_()
        return group.all_reduce(squares).div_(self.width).add_(self.eps).rsqrt_()


def scale_rows(x: Tensor, weight: Tensor, scales: Tensor) -> None:
    """Multiply x [T, D] by fp32 weight [D] and scales [T], in place and rounded once."""
    for begin in range(0, len(x), BLOCK_ROWS):
        rows = x[begin : begin + BLOCK_ROWS]
        rows.copy_(rows.float().mul_(scales[begin : begin + BLOCK_ROWS, None]).mul_(weight))


@dataclass(frozen=True)
class NormTable:
    """A norm with known statistics, for the convolution that reads the normed values."""

    table: Tensor  # [B, 3, C]
    activation: str


class GroupNorm:
    """activation((x - mean) / sqrt(var + eps) * weight + bias), over all pixels of an item and a group of channels."""

    def __init__(self, name: str, channels: int, num_groups: int, eps: float, *, activation: str = "none") -> None:
        self.num_groups, self.eps, self.activation = num_groups, eps, activation
        self.weight = Unpacked(f"{name}.weight", channels)
        self.bias = Unpacked(f"{name}.bias", channels)

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the norm of x [B, ..., C]; `out` may be x."""
        return group_norm(
            x, self.num_groups, self.weight.value, self.bias.value, self.eps, activation=self.activation, out=out
        )

    def statistics(self, x: Tensor) -> Tensor:
        """Return mean and variance [B, groups, 2] of x [B, ..., C]."""
        return group_statistics(x, self.num_groups)

    def table(self, statistics: Tensor) -> NormTable:
        """Return the norm for these statistics."""
        table = group_norm_table(statistics, self.weight.value, self.bias.value, self.eps)
        return NormTable(table, self.activation)
