"""LayerNorm with the weights a checkpoint has for it."""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.norm import layer_norm
from tilewright.weights.spec import Plain


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        self.eps = eps
        self.weight, self.bias = Plain(f"{name}.weight", width), Plain(f"{name}.bias", width)

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return layer_norm(x, self.weight.value, self.bias.value, self.eps, out=out)
