"""GroupNorm of pictures and clips, channels last; kernels in csrc/kernels/group_norm."""

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty


@op
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
    """activation((x - mean) / sqrt(var + eps) * weight + bias) of x [B, ..., C], any number of axes between.

    Mean and variance are those of an item's groups of C / num_groups neighbouring channels, over all axes between.
    `activation` as of `linear`: silu in autoencoders. `out` may be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.group_norm(view(x), view_or_none(weight), view_or_none(bias), view(out), num_groups, eps, activation)
    return out


@op
def group_statistics(x: Tensor, num_groups: int) -> Tensor:
    """Mean and variance, fp32 [B, num_groups, 2], of an item's groups of channels, as `group_norm` has them."""
    out = torch.empty(x.shape[0], num_groups, 2)
    kernels.group_statistics(view(x), view(out), num_groups)
    return out


def group_norm_table(statistics: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """fp32 [B, 3, C]: mean, factor and bias of each channel, as `conv3d` takes a norm; statistics [B, G, 2]."""
    width = len(weight) // statistics.shape[1]
    mean, variance = (part.repeat_interleave(width, dim=1) for part in statistics.unbind(2))
    factor = (variance.double() + eps).rsqrt() * weight.double()
    return torch.stack((mean, factor.float(), bias.float().expand_as(mean)), dim=1)
