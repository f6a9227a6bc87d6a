"""GroupNorm of pictures and clips, channels last; kernels in csrc/kernels/group_norm."""

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
