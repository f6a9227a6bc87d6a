"""LayerNorm with the weights a checkpoint has for it."""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.norm import layer_norm
from tilewright.weights.unpacked import Unpacked


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis."""

    def __init__(self, name: str, width: int, eps: float, *, bias: bool = True) -> None:
        self.eps = eps
        self.weight = Unpacked(f"{name}.weight", width)
        self.bias = Unpacked(f"{name}.bias", width) if bias else None

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return layer_norm(x, self.weight.value, self.bias.value if self.bias else None, self.eps, out=out)
