"""GroupNorm of pictures and clips, channels last."""

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend.activation import ACTIVATIONS
from tilewright.ops.torch_backend.common import into


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    wide_weight, wide_bias = (None if t is None else t.float() for t in (weight, bias))
    y = functional.group_norm(x.float().movedim(-1, 1), num_groups, wide_weight, wide_bias, eps).movedim(1, -1)
    return into(out, ACTIVATIONS[activation](y).to(x.dtype))


def group_statistics(x: Tensor, num_groups: int) -> Tensor:
    groups = x.float().unflatten(-1, (num_groups, -1)).movedim(-2, 1).flatten(2)
    variance, mean = torch.var_mean(groups, dim=2, correction=0)
    return torch.stack((mean, variance), dim=2)
