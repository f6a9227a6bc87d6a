"""Pictures to patches: resized, normalised and cut in one pass."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close
from tilewright.ops import image
from tilewright.ops.torch_backend import image as reference

# Rows and columns as a camera or a screen gives them, and as the model takes them (multiples of 32).
PICTURES = (((1080, 1920), (1088, 1920)), ((3024, 4032), (1536, 2048)))
PATCH, MERGE = 16, 2
MEAN = STD = (0.5, 0.5, 0.5)


def rows() -> Iterator[Row]:
    for source, target in PICTURES:
        pixels_in, pixels_out = source[0] * source[1], target[0] * target[1]
        shape = f"{source[0]} x {source[1]} to {target[0]} x {target[1]}"
        taps = 4 * max(1.0, source[0] / target[0])  # of each of the two passes, two operations each
        flops = 3 * pixels_out * int(4 * taps)
        yield Row("image patches", shape, 3 * pixels_in + 6 * pixels_out, flops, partial(_patches, source, target))


def _patches(source: tuple[int, int], target: tuple[int, int]) -> Calls:
    # Smooth waves: noise would be clipped at each overshoot, where rounding differs most.
    waves = torch.sin(torch.arange(source[0] * source[1] * 3).view(*source, 3) * 0.01)
    picture = (waves * 100 + 128).to(torch.uint8)
    ours = partial(image.patches, picture, *target, patch_size=PATCH, merge_size=MERGE, mean=MEAN, std=STD)
    twin = partial(reference.patches, picture, *target, patch_size=PATCH, merge_size=MERGE, mean=MEAN, std=STD)
    out = ours()
    channels_first = picture.permute(2, 0, 1)[None].contiguous()
    return Calls(
        lambda _: ours(out=out),
        lambda _: _torch_patches(channels_first, target),
        lambda: close(ours(), twin()),
    )


def _torch_patches(picture: Tensor, target: tuple[int, int]) -> Tensor:
    """As the fast processors of transformers do it, in torch alone."""
    resized = functional.interpolate(picture, target, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    normal = (resized.float() / 255 - mean) / std
    rows, columns = target[0] // PATCH // MERGE, target[1] // PATCH // MERGE
    cut = normal.view(3, rows, MERGE, PATCH, columns, MERGE, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
    return cut.reshape(-1, 3 * PATCH * PATCH).to(torch.bfloat16)
