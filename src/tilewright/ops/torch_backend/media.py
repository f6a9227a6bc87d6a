"""Image preprocessing, equal to the kernels' bit for bit, and log-mel spectrograms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.media import HOP, MIN_SAMPLES, WINDOW, Filter, mel_filters
from tilewright.ops.torch_backend.common import into


def resize(image: Tensor, height: int, width: int, filter: Filter = "bicubic", *, out: Tensor | None = None) -> Tensor:
    """Resize an image; the pass that loses more comes first, as in Pillow 13."""
    rows_axis, columns_axis = image.dim() - 3, image.dim() - 2
    rows_lost, columns_lost = image.shape[rows_axis] - height, image.shape[columns_axis] - width
    passes = [(columns_axis, width), (rows_axis, height)]
    if rows_lost > 0 and rows_lost > 2 * columns_lost:
        passes.reverse()
    for axis, size in passes:
        image = _resize_axis(image, axis, size, filter)
    return into(out, image)


def _resize_axis(image: Tensor, axis: int, out_size: int, filter: str) -> Tensor:
    if image.shape[axis] == out_size:
        return image
    weight = _axis_weights(image.shape[axis], out_size, filter, image.device)
    # Integers under 2^53: sums in fp64 are exact in any order, and any device multiplies matrices of them.
    total = torch.tensordot(weight, image.double(), dims=([1], [axis])).movedim(0, axis)
    return ((total + 2.0**21) / 2.0**22).floor().clamp(0, 255).to(torch.uint8)


def _axis_weights(in_size: int, out_size: int, filter: str, device: torch.device) -> Tensor:
    """Return Pillow's fixed-point weights of one axis, with 22 fraction bits, as a dense matrix [out_size, in_size]."""
    scale = in_size / out_size
    filter_scale = max(scale, 1.0)
    support = (2.0 if filter == "bicubic" else 1.0) * filter_scale
    center = (torch.arange(out_size, dtype=torch.float64, device=device)[:, None] + 0.5) * scale
    source = torch.arange(in_size, dtype=torch.float64, device=device)[None]
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
    # One by one from the left, as in Pillow: torch's own sum may pair them.
    weight = weight / weight.cumsum(1)[:, -1:] * 2.0**22
    return torch.where(weight < 0, weight - 0.5, weight + 0.5).trunc()


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
    frames = image if image.dim() == 4 else image[None]
    pixels = resize(frames, height, width, filter)
    # A pixel has 256 values: normalising is a look-up table per channel.
    levels = (torch.arange(256, dtype=torch.float64) * rescale).float()
    table = ((levels[:, None] - torch.tensor(mean)) / torch.tensor(std)).to(out.dtype if out is not None else dtype)
    normal = table.to(image.device)[pixels.long(), torch.arange(3, device=image.device)]
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
    return into(out, rows.reshape(-1, 3 * temporal_patch_size * patch_size**2))


def log_mel(samples: Tensor, num_bins: int, *, out: Tensor | None = None) -> Tensor:
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"log_mel: there are {len(samples)} samples, expected {MIN_SAMPLES} or more")
    half = WINDOW // 2
    mirrored = torch.nn.functional.pad(samples[None, None], (half, half), mode="reflect")[0, 0]
    frames = mirrored.unfold(0, WINDOW, HOP)[: len(samples) // HOP]
    spectrum = torch.fft.rfft(frames * torch.hann_window(WINDOW, device=samples.device))
    power = spectrum.real.square() + spectrum.imag.square()
    logs = (power @ mel_filters(num_bins).to(samples.device).T).clamp(min=1e-10).log10()
    return into(out, (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0)
