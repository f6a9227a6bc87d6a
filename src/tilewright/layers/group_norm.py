"""GroupNorm with the weights a checkpoint has for it."""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.group_norm import group_norm
from tilewright.weights.unpacked import Unpacked


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
