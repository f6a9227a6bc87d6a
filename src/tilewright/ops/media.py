"""Preprocessing of media: images to patches, sounds to log-mel frames; kernels in csrc/kernels/{image,mel}.

The convolution that turns images into patch vectors is a packed linear: its stride equals its kernel, so each patch
is one row of a matrix product. A still image has one frame: transformers repeats it over the kernel's time axis, we
sum the kernel over time instead, which halves pixels and products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.linear import PackedWeight, linear, pack_weight
from tilewright.ops.native import kernels, view

Filter = Literal["bicubic", "bilinear"]


@op
def resize(image: Tensor, height: int, width: int, filter: Filter = "bicubic", *, out: Tensor | None = None) -> Tensor:
    """Return an 8-bit RGB image [H, W, 3], or frames [F, H, W, 3], resized to [height, width].

    Equal to Pillow 13's bit for bit; before 13 it always ran the horizontal pass first. Rows may have a stride. `out`
    must not overlap `image`.
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
    """Return patches [N, 3 * Tp * P * P] of an 8-bit RGB image [H, W, 3] or video [F, H, W, 3], resized first.

    Rows are ordered by frame group, then by (y, x) of the merged patch, then by (y, x) within it; a row is
    [channel][frame][y][x] of (pixel * rescale - mean) / std. A still has one frame: Tp is 1. `out` may be a slice of
    rows of a larger buffer that holds all images of a request.
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


SAMPLE_RATE = 16_000
WINDOW = 400  # samples: 25 ms
HOP = 160  # samples from one frame to the next: 10 ms
NUM_FREQUENCIES = WINDOW // 2 + 1
# Half a window is mirrored at each end.
MIN_SAMPLES = WINDOW // 2 + 1


@op
def log_mel(samples: Tensor, num_bins: int, *, out: Tensor | None = None) -> Tensor:
    """Return frames fp32 [samples // HOP, num_bins] of mono samples fp32 [N] at 16 kHz, as Whisper's extractor does.

    The power of each frequency under a Hann window around every HOP-th sample, summed by triangles on Slaney's mel
    scale; log10 of it, at least 1e-10 and at most 8 below the loudest of all frames, plus 4, over 4.
    """
    if out is None:
        out = torch.empty((len(samples) // HOP, num_bins))
    kernels.log_mel(view(samples), view(mel_filters(num_bins)), view(out))
    return out


@functools.cache
def mel_filters(num_bins: int) -> Tensor:
    """Return filters fp32 [num_bins, NUM_FREQUENCIES]: a triangle per bin between its neighbours, of equal areas."""
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, NUM_FREQUENCIES, dtype=torch.float64)
    mels = torch.linspace(0, _mel_of(SAMPLE_RATE / 2), num_bins + 2, dtype=torch.float64)
    corners = torch.tensor([_hertz_of(mel) for mel in mels.tolist()], dtype=torch.float64)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising = (frequencies - low) / (middle - low)
    falling = (high - frequencies) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * (2.0 / (high - low))).float()


# Slaney's scale: linear up to 1 kHz, 15 mel; then 27 mel for a factor of 6.4.
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
_MELS_PER_LOG = 27.0 / math.log(6.4)


def _mel_of(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * _LINEAR_MELS / _LINEAR_HERTZ
    return _LINEAR_MELS + math.log(hertz / _LINEAR_HERTZ) * _MELS_PER_LOG


def _hertz_of(mel: float) -> float:
    if mel < _LINEAR_MELS:
        return mel * _LINEAR_HERTZ / _LINEAR_MELS
    return _LINEAR_HERTZ * math.exp((mel - _LINEAR_MELS) / _MELS_PER_LOG)


def pack_patch_embedding(
    weight: Tensor, bias: Tensor | None = None, *, still: bool, dtype: torch.dtype | None = None
) -> PackedWeight:
    """Pack a Conv3d weight [D, C, frames, P, P] for patches [C, P, P] of stills, or [C, frames, P, P] of video.

    A Conv2d weight [D, C, P, P] is for stills. The sum over time is computed in fp32 and rounded once, to the packed
    dtype.
    """
    if weight.dim() not in (4, 5):
        raise ValueError(f"patch embedding weight has shape {list(weight.shape)}, expected [D, C, frames, P, P]")
    if weight.dim() == 5 and still:
        weight = weight.float().sum(2).to(dtype or weight.dtype)
    return pack_weight(weight.flatten(1).contiguous(), bias, dtype=dtype)


def patch_embedding(patches: Tensor, weight: PackedWeight, *, out: Tensor | None = None) -> Tensor:
    """Return [N, D] for patches [N, C * frames * P * P], each in the order the weight was packed for."""
    return linear(patches, weight, out=out)
