"""RMSNorm of the hidden state, with the weight a checkpoint has for it."""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.norm import rms_norm
from tilewright.weights.unpacked import Unpacked


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; `plus_one`: times 1 + weight."""

    def __init__(self, name: str, width: int, eps: float, *, plus_one: bool = False) -> None:
        self.eps, self.plus_one = eps, plus_one
        self.weight = Unpacked(f"{name}.weight", width)

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight.value, self.eps, weight_plus_one=self.plus_one, out=out)
