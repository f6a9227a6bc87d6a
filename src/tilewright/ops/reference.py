"""The same ops in plain torch: the twin every kernel is tested against, and the path for other devices.

Each twin computes in fp32 and rounds once at the end, as the kernels do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# ---- norm


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    weight_plus_one: bool = False,
) -> Tensor:
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * scale * (weight.float() + (1.0 if weight_plus_one else 0.0))
    if gate is not None:
        y = y * torch.nn.functional.silu(gate.float())
    return y.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    y = torch.nn.functional.layer_norm(
        x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps
    )
    return y.to(x.dtype)


# ---- image


def _axis_weights(in_size: int, out_size: int, filter: str) -> Tensor:
    """Pillow's fixed-point weights of one axis as a dense int64 matrix [out_size, in_size]."""
    scale = in_size / out_size
    filter_scale = max(scale, 1.0)
    support = (2.0 if filter == "bicubic" else 1.0) * filter_scale
    center = (torch.arange(out_size, dtype=torch.float64)[:, None] + 0.5) * scale
    source = torch.arange(in_size, dtype=torch.float64)[None]
    x = ((source - center + 0.5) * (1.0 / filter_scale)).abs()
    if filter == "bicubic":
        near = (1.5 * x - 2.5) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * -0.5
        weight = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    else:
        weight = (1 - x).clamp(min=0)
    begin = (center - support + 0.5).trunc()
    end = (center + support + 0.5).trunc()
    weight = torch.where((source >= begin) & (source < end), weight, 0.0)
    # One by one from the left, as Pillow adds them: torch's own sum may pair them up.
    weight = weight / weight.cumsum(1)[:, -1:] * 2.0**22
    return torch.where(weight < 0, weight - 0.5, weight + 0.5).trunc().to(torch.int64)


def _resize_axis(image: Tensor, axis: int, out_size: int, filter: str) -> Tensor:
    if image.shape[axis] == out_size:
        return image
    weight = _axis_weights(image.shape[axis], out_size, filter)
    total = torch.tensordot(weight, image.to(torch.int64), dims=([1], [axis])).movedim(0, axis)
    return ((total + (1 << 21)) >> 22).clamp(0, 255).to(torch.uint8)


def resize(image: Tensor, height: int, width: int, filter: str = "bicubic") -> Tensor:
    rows_lost, columns_lost = image.shape[-3] - height, image.shape[-2] - width
    if rows_lost > 0 and rows_lost > 2 * columns_lost:
        return _resize_axis(_resize_axis(image, -3 % image.dim(), height, filter), -2 % image.dim(), width, filter)
    return _resize_axis(_resize_axis(image, -2 % image.dim(), width, filter), -3 % image.dim(), height, filter)


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
    filter: str = "bicubic",
    temporal_patch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    frames = image if image.dim() == 4 else image[None]
    pixels = resize(frames, height, width, filter)
    # A pixel has 256 values: normalising is a table of them per channel.
    levels = (torch.arange(256, dtype=torch.float64) * rescale).float()
    table = (levels[:, None] - torch.tensor(mean)) / torch.tensor(std)
    normal = table.to(dtype)[pixels.long(), torch.arange(3)]
    grouped = normal.view(
        -1,
        temporal_patch_size,
        height // patch_size // merge_size,
        merge_size,
        patch_size,
        width // patch_size // merge_size,
        merge_size,
        patch_size,
        3,
    )
    rows = grouped.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return rows.reshape(-1, 3 * temporal_patch_size * patch_size**2)
