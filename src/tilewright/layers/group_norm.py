"""GroupNorm with the weights a checkpoint has for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewright.ops.group_norm import group_norm, group_norm_table, group_statistics
from tilewright.weights.unpacked import Unpacked


@dataclass(frozen=True)
class NormTable:
    """A norm whose statistics are known, for the convolution that reads what it norms."""

    table: Tensor  # [B, 3, C]
    activation: str


class GroupNorm:
    """activation((x - mean) / sqrt(var + eps) * weight + bias), over all pixels of an item and a group of channels."""

    def __init__(self, name: str, channels: int, num_groups: int, eps: float, *, activation: str = "none") -> None:
        self.num_groups, self.eps, self.activation = num_groups, eps, activation
        self.weight = Unpacked(f"{name}.weight", channels)
        self.bias = Unpacked(f"{name}.bias", channels)

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Of x [B, ..., C]; `out` may be x."""
        return group_norm(
            x, self.num_groups, self.weight.value, self.bias.value, self.eps, activation=self.activation, out=out
        )

    def statistics(self, x: Tensor) -> Tensor:
        """Mean and variance [B, groups, 2] of x [B, ..., C]."""
        return group_statistics(x, self.num_groups)

    def table(self, statistics: Tensor) -> NormTable:
        """The norm of what has such statistics."""
        table = group_norm_table(statistics, self.weight.value, self.bias.value, self.eps)
        return NormTable(table, self.activation)
