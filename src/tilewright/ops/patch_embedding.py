"""The convolution that turns pictures into patch vectors, as a packed linear.

Its stride equals its kernel, so each patch is one row of a matrix product. A still picture has one frame: transformers
repeats it over the kernel's time axis, we sum the kernel over time instead, which halves pixels and products.
"""

import torch
from torch import Tensor

from tilewright.ops.linear import PackedWeight, linear, pack_weight


def pack_patch_embedding(
    weight: Tensor, bias: Tensor | None = None, *, still: bool, dtype: torch.dtype | None = None
) -> PackedWeight:
    """Conv3d weight [D, C, frames, P, P] for patches [C, P, P] of stills, or [C, frames, P, P] of video.

    A Conv2d weight [D, C, P, P] is one for stills. The sum over time is made in fp32 and rounded once, to
    the dtype that is packed.
    """
    if weight.dim() not in (4, 5):
        raise ValueError(f"patch embedding weight has shape {list(weight.shape)}, expected [D, C, frames, P, P]")
    if weight.dim() == 5 and still:
        weight = weight.float().sum(2).to(dtype or weight.dtype)
    return pack_weight(weight.flatten(1).contiguous(), bias, dtype=dtype)


def patch_embedding(patches: Tensor, weight: PackedWeight, *, out: Tensor | None = None) -> Tensor:
    """[N, D] for patches [N, C * frames * P * P], each in the order the weight was packed for."""
    return linear(patches, weight, out=out)
