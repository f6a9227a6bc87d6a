"""Picture preprocessing: resize, normalise and cut into patches in one pass; kernels in csrc/kernels/image."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view

Filter = Literal["bicubic", "bilinear"]


@op
def resize(image: Tensor, height: int, width: int, filter: Filter = "bicubic", *, out: Tensor | None = None) -> Tensor:
    """The 8-bit RGB picture [H, W, 3], or frames [F, H, W, 3], resized to [height, width].

    Bit for bit what Pillow 13 gives; before 13 it always ran the horizontal pass first. Rows may have a stride.
    `out` must not overlap `image`.
    """
    if out is None:
        out = torch.empty((*image.shape[:-3], height, width, 3), dtype=torch.uint8)
    kernels.image_resize(view(image), view(out), height, width, filter)
    return out


@op
def patches(
    image: Tensor,
    height: int,
    width: int,
    *,
    patch_size: int,
    merge_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    rescale: float = 1 / 255,
    filter: Filter = "bicubic",
    temporal_patch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Patches [N, 3 * Tp * P * P] of an 8-bit RGB picture [H, W, 3], or video [F, H, W, 3], resized to [height, width].

    Rows go frame group by frame group, then by (y, x) of the merged patch, then by (y, x) within it; a row is
    [channel][frame][y][x] of (pixel * rescale - mean) / std. A still has one frame: Tp is 1. `out` may be a slice of
    rows of a larger buffer, so that the pictures of a request lie in one.
    """
    if out is None:
        frames = image.shape[0] if image.dim() == 4 else 1
        rows = frames // temporal_patch_size * (height // patch_size) * (width // patch_size)
        out = torch.empty((rows, 3 * temporal_patch_size * patch_size**2), dtype=dtype)
    kernels.image_patches(
        view(image),
        view(out),
        height,
        width,
        filter,
        patch_size,
        merge_size,
        temporal_patch_size,
        rescale,
        tuple(mean),
        tuple(std),
    )
    return out
