"""Rows of convolutions, image preprocessing and log-mel frames.

Convolutions do many operations per byte, so their calls need no rotation of buffers.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random
from tilewright.ops import media
from tilewright.ops.conv import conv2d, conv3d, pack_conv
from tilewright.ops.media import HOP, NUM_FREQUENCIES, SAMPLE_RATE, WINDOW, log_mel
from tilewright.ops.torch_backend import media as media_reference
from tilewright.ops.torch_backend.conv import plain_conv3d

# Pixels on a side, channels in and out: a decoder of 512 channels at its lowest resolution, 128 at its highest.
IMAGES = ((64, 512, 512), (128, 128, 128), (128, 512, 512), (256, 256, 256), (256, 512, 256), (512, 128, 128))
# Frames, rows, columns, channels: stages of a video decoder with one and four frames.
CLIPS = ((1, 60, 104, 384), (4, 120, 104, 192))
# The reference runs in fp32: this many rows suffice to show a wrong kernel.
CHECKED_ROWS = 8


def conv_rows() -> Iterator[Row]:
    for size, channels, outputs in IMAGES:
        yield _row("conv2d", (1, size, size, channels), outputs, (1, 3, 3), partial(_image, size, channels, outputs))
    yield _row("conv2d upsampled", (1, 128, 128, 256), 256, (1, 3, 3), partial(_upsampled, 64, 256), "x2 of ")
    yield _row("conv2d stride 2", (1, 128, 128, 256), 256, (1, 3, 3), partial(_strided, 256, 256))
    for frames, height, width, channels in CLIPS:
        shape = frames, height, width, channels
        yield _row("conv3d", shape, channels, (3, 3, 3), partial(_clip, *shape))


def _row(
    name: str,
    out: tuple[int, int, int, int],
    outputs: int,
    kernel: tuple[int, int, int],
    prepare: Callable[[], Calls],
    note: str = "",
) -> Row:
    frames, height, width, channels = out
    taps = kernel[0] * kernel[1] * kernel[2]
    pixels = frames * height * width
    moved = 2 * (pixels * (channels + outputs) + taps * channels * outputs)
    shape = f"{note}[{frames}, {height}, {width}, {channels}] to {outputs}"
    return Row(name, shape, moved, 2 * pixels * taps * channels * outputs, prepare, name)


@cache
def _fastest_dtype() -> torch.dtype:
    """Return bfloat16 or float32, whichever torch convolves in faster, channels last."""
    times_s = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = _channels_first(torch.ones(1, 32, 32, 64, dtype=dtype)), torch.ones(64, 64, 3, 3, dtype=dtype)
        functional.conv2d(x, weight, padding=1)
        begin = perf_counter()
        functional.conv2d(x, weight, padding=1)
        times_s[dtype] = perf_counter() - begin
    return min(times_s, key=lambda dtype: times_s[dtype])


def _channels_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1)  # a view of memory with channels last: torch's channels_last


def _weight(outputs: int, channels: int, *kernel: int) -> Tensor:
    return random(outputs, channels, *kernel, scale=(channels * 9) ** -0.5, seed=1)


def _conv2d(x: Tensor, outputs: int, stride: int, padding: tuple[int, int, int, int], upsample: bool) -> Calls:
    weight, bias = _weight(outputs, x.shape[-1], 3, 3), random(outputs, seed=2)
    packed = pack_conv(weight, bias)
    run = partial(conv2d, weight=packed, stride=(stride, stride), padding=padding, upsample=upsample)
    out = run(x)
    dtype = _fastest_dtype()
    their_x = _channels_first(x.to(dtype))
    their_weight = weight.to(dtype).contiguous(memory_format=torch.channels_last)
    their_bias = bias.to(dtype)
    top, bottom, left, right = padding

    def theirs(_: int) -> object:
        source = their_x
        if upsample:
            source = functional.interpolate(source, scale_factor=2.0, mode="nearest")
        if top != bottom:
            source = functional.pad(source, (left, right, top, bottom))
        return functional.conv2d(source, their_weight, their_bias, stride, top if top == bottom else 0)

    def check() -> bool:
        part = x[:, :CHECKED_ROWS]
        frames, three = part[:, None], weight[:, :, None]
        expected = plain_conv3d(frames, three, bias, stride=(1, stride, stride), padding=padding, upsample=upsample)
        return close(run(part), expected[:, 0])

    return Calls(lambda _: run(x, out=out), theirs, check)


def _image(size: int, channels: int, outputs: int) -> Calls:
    return _conv2d(random(1, size, size, channels), outputs, 1, (1, 1, 1, 1), False)


def _upsampled(size: int, channels: int) -> Calls:
    return _conv2d(random(1, size, size, channels), channels, 1, (1, 1, 1, 1), True)


def _strided(size: int, channels: int) -> Calls:
    return _conv2d(random(1, size, size, channels), channels, 2, (0, 1, 0, 1), False)


def _clip(frames: int, height: int, width: int, channels: int) -> Calls:
    x, previous = random(1, frames, height, width, channels), random(1, 2, height, width, channels, seed=3)
    weight, bias = _weight(channels, channels, 3, 3, 3), random(channels, seed=2)
    packed, dtype = pack_conv(weight, bias), _fastest_dtype()
    out = torch.empty_like(x)
    their_x = _channels_first(x.to(dtype))
    their_previous = _channels_first(previous.to(dtype))
    their_weight = weight.to(dtype).contiguous(memory_format=torch.channels_last_3d)
    their_bias = bias.to(dtype)

    def ours(_: int) -> object:
        return conv3d(x, packed, padding=(1, 1, 1, 1), previous=previous, out=out)

    def theirs(_: int) -> object:
        source = torch.cat((their_previous, their_x), dim=2)
        return functional.conv3d(source, their_weight, their_bias, 1, (0, 1, 1))

    def check() -> bool:
        part, before = x[:, :1, :CHECKED_ROWS], previous[:, :, :CHECKED_ROWS]
        expected = plain_conv3d(part, weight, bias, padding=(1, 1, 1, 1), previous=before)
        return close(conv3d(part, packed, padding=(1, 1, 1, 1), previous=before), expected)

    return Calls(ours, theirs, check)


# Rows and columns of a camera or a screen, and of the model's input (multiples of 32).
CHAT_IMAGES = (((1080, 1920), (1088, 1920)), ((3024, 4032), (1536, 2048)))
PATCH, MERGE = 16, 2
MEAN = STD = (0.5, 0.5, 0.5)


def image_rows() -> Iterator[Row]:
    for source, target in CHAT_IMAGES:
        pixels_in, pixels_out = source[0] * source[1], target[0] * target[1]
        shape = f"{source[0]} x {source[1]} to {target[0]} x {target[1]}"
        taps = 4 * max(1.0, source[0] / target[0])  # per pass of two, two operations each
        flops = 3 * pixels_out * int(4 * taps)
        yield Row("image patches", shape, 3 * pixels_in + 6 * pixels_out, flops, partial(_patches, source, target))


def _patches(source: tuple[int, int], target: tuple[int, int]) -> Calls:
    # Smooth waves: noise would be clipped at overshoots, where rounding differs most.
    waves = torch.sin(torch.arange(source[0] * source[1] * 3).view(*source, 3) * 0.01)
    image = (waves * 100 + 128).to(torch.uint8)
    ours = partial(media.patches, image, *target, patch_size=PATCH, merge_size=MERGE, mean=MEAN, std=STD)
    twin = partial(media_reference.patches, image, *target, patch_size=PATCH, merge_size=MERGE, mean=MEAN, std=STD)
    out = ours()
    channels_first = image.permute(2, 0, 1)[None].contiguous()
    return Calls(
        lambda _: ours(out=out),
        lambda _: _torch_patches(channels_first, target),
        lambda: close(ours(), twin()),
    )


def _torch_patches(image: Tensor, target: tuple[int, int]) -> Tensor:
    """Return patches computed in torch, as in the fast processors of transformers."""
    resized = functional.interpolate(image, target, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    normal = (resized.float() / 255 - mean) / std
    image_rows, columns = target[0] // PATCH // MERGE, target[1] // PATCH // MERGE
    cut = normal.view(3, image_rows, MERGE, PATCH, columns, MERGE, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
    return cut.reshape(-1, 3 * PATCH * PATCH).to(torch.bfloat16)


SECONDS = (8, 60)
NUM_BINS = 128


def mel_rows() -> Iterator[Row]:
    for seconds in SECONDS:
        num_samples = seconds * SAMPLE_RATE
        num_frames = num_samples // HOP
        # A transform of n points takes 2.5 n log2 n operations; a frequency is in two triangles.
        flops = num_frames * (int(2.5 * WINDOW * 8.6) + 7 * NUM_FREQUENCIES)
        bytes_moved = 4 * (num_samples + num_frames * NUM_BINS)
        yield Row("log_mel", f"{seconds} s, {NUM_BINS} bins", bytes_moved, flops, partial(_log_mel, num_samples))


def _log_mel(num_samples: int) -> Calls:
    samples = torch.randn(num_samples, generator=torch.Generator().manual_seed(0)) * 0.1
    out = log_mel(samples, NUM_BINS)
    return Calls(
        lambda _: log_mel(samples, NUM_BINS, out=out),
        lambda _: media_reference.log_mel(samples, NUM_BINS),
        lambda: torch.allclose(log_mel(samples, NUM_BINS), media_reference.log_mel(samples, NUM_BINS), atol=1e-4),
    )
