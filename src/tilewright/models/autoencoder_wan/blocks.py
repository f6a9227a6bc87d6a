"""Blocks of Wan's autoencoder: clips [B, T, H, W, C] in pieces of a few frames and tiles of a few pixels.

Norms are over the channels of a pixel. Where a pixel sees only its neighbourhood, a tile with enough pixels around it
has the values of the whole, bit for bit: nothing needs to be blended. A tile is computed for all its frames before the
next one, so that the frames that convolutions keep belong to one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from tilewright.layers.conv import CausalConv3d, Conv2d, UpsampleConv2d
from tilewright.layers.memory import FeatureMemory
from tilewright.models.vae import memory_budget
from tilewright.ops.activation import add
from tilewright.ops.attention import varlen_attention
from tilewright.ops.norm import rms_norm
from tilewright.weights.conv import Unpacked


class FrameHistory:
    """Last frames that each convolution over time has read of a clip, whose pieces go through a network in turn.

    A piece's result is the same as for the whole clip.
    """

    def __init__(self) -> None:
        self.is_first = True  # whether the current piece is the first
        self.is_last = False
        self._frames: dict[CausalConv3d, Tensor] = {}

    def convolve(
        self, conv: CausalConv3d, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return conv over x and the frames before it, + residual."""
        result = conv(x, self._frames.get(conv), residual=residual, out=out)
        self.keep(conv, x)
        return result

    def keep(self, conv: CausalConv3d, x: Tensor) -> None:
        """Keep as many of the last frames up to x's end as the convolution reads again."""
        count = conv.num_previous
        if self.is_last or not count:
            self._frames.pop(conv, None)
            return
        before = self._frames.get(conv)
        if x.shape[1] >= count or before is None:
            self._frames[conv] = x[:, -count:].clone()
        else:
            self._frames[conv] = torch.cat((before[:, x.shape[1] - count :], x), dim=1)


class ChannelNorm:
    """x / |x| * sqrt(C) * weight over the channels of each pixel, with `activation` silu or none."""

    def __init__(self, name: str, channels: int, *, num_axes: int = 3, activation: str = "none") -> None:
        self.weight = Unpacked(f"{name}.gamma", channels, *(1,) * num_axes)
        self.activation = activation
        self.eps = 1e-24 / channels  # the original clamps |x| at 1e-12

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight.value.view(-1), self.eps, activation=self.activation, out=out)


class ResidualBlock:
    """shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x)))))), where the shortcut is x if it has as many channels."""

    def __init__(self, name: str, in_channels: int, out_channels: int) -> None:
        self.norm1 = ChannelNorm(f"{name}.norm1", in_channels, activation="silu")
        self.conv1 = CausalConv3d(f"{name}.conv1", in_channels, out_channels)
        self.norm2 = ChannelNorm(f"{name}.norm2", out_channels, activation="silu")
        self.conv2 = CausalConv3d(f"{name}.conv2", out_channels, out_channels)
        self.shortcut = (
            CausalConv3d(f"{name}.conv_shortcut", in_channels, out_channels, (1, 1, 1))
            if in_channels != out_channels
            else None
        )

    def __call__(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        """Return the block's result, which may lie in x's memory: the block frees or overwrites x."""
        shape = (*x.shape[:-1], self.conv1.out_channels)
        if self.shortcut is None:
            out, normed = x, self.norm1(x, out=memory.empty_like(x))
        else:
            out, normed = self.shortcut(x, out=memory.empty(shape, x.dtype)), self.norm1(x, out=x)
        inner = history.convolve(self.conv1, normed, out=memory.empty(shape, x.dtype))
        memory.free(normed)
        history.convolve(self.conv2, self.norm2(inner, out=inner), residual=out, out=out)
        memory.free(inner)
        return out


class WanAttentionBlock:
    """x + attention over the pixels of each frame, with one head as wide as the channels."""

    def __init__(self, name: str, channels: int) -> None:
        self.norm = ChannelNorm(f"{name}.norm", channels, num_axes=2)
        self.qkv = Conv2d(f"{name}.to_qkv", channels, 3 * channels, 1)
        self.output = Conv2d(f"{name}.proj", channels, channels, 1)

    def __call__(self, x: Tensor) -> Tensor:
        frames = x.flatten(0, 1)
        channels, length = x.shape[-1], x.shape[2] * x.shape[3]
        q, k, v = self.qkv(self.norm(frames)).view(-1, 3, channels).split(1, dim=1)
        starts = torch.arange(0, (len(frames) + 1) * length, length, dtype=torch.int32, device=x.device)
        attended = varlen_attention(q, k, v, starts).view(frames.shape)
        return self.output(attended, residual=frames, out=frames).view(x.shape)


class WanMidBlock:
    def __init__(self, name: str, channels: int) -> None:
        self.first = ResidualBlock(f"{name}.resnets.0", channels, channels)
        self.attention = WanAttentionBlock(f"{name}.attentions.0", channels)
        self.second = ResidualBlock(f"{name}.resnets.1", channels, channels)

    def __call__(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        x = self.first(x, history, memory)
        return self.second(self.attention(x), history, memory)


class Downsampler:
    """Halves rows and columns, and frames with `halves_time`, except the first piece's single frame."""

    def __init__(self, name: str, channels: int, *, halves_time: bool) -> None:
        self.conv = Conv2d(f"{name}.resample.1", channels, channels, stride=2, padding=(0, 1, 0, 1))
        self.time_conv = (
            CausalConv3d(f"{name}.time_conv", channels, channels, (3, 1, 1), time_stride=2) if halves_time else None
        )

    def __call__(
        self, x: Tensor, history: FrameHistory, memory: FeatureMemory, *, residual: Tensor | None = None
    ) -> Tensor:
        """Return the smaller clip + residual, which has its shape."""
        batch, frames, rows, columns, channels = x.shape
        small = memory.empty((batch, frames, rows // 2, columns // 2, channels), x.dtype)
        at_once = residual if self.time_conv is None else None
        self.conv(x.flatten(0, 1), residual=None if at_once is None else at_once.flatten(0, 1), out=small.flatten(0, 1))
        memory.free(x)
        if self.time_conv is None:
            return small
        if history.is_first:
            history.keep(self.time_conv, small)
            return small if residual is None else add(small, residual, out=small)
        out = memory.empty((batch, frames // 2, *small.shape[2:]), x.dtype)
        history.convolve(self.time_conv, small, residual=residual, out=out)
        memory.free(small)
        return out


class Upsampler:
    """Doubles rows and columns, and frames with `doubles_time`, except the first piece's single frame."""

    def __init__(self, name: str, channels: int, out_channels: int, *, doubles_time: bool) -> None:
        self.conv = UpsampleConv2d(f"{name}.resample.1", channels, out_channels)
        # The first piece skips it, and the second reads zeros before its frames.
        self.time_conv = CausalConv3d(f"{name}.time_conv", channels, 2 * channels, (3, 1, 1)) if doubles_time else None

    def __call__(
        self, x: Tensor, history: FrameHistory, memory: FeatureMemory, *, residual: Tensor | None = None
    ) -> Tensor:
        """Return the larger clip + residual, which has its shape and is overwritten by it."""
        if self.time_conv is not None and not history.is_first:
            batch, frames, rows, columns, channels = x.shape
            pairs = history.convolve(self.time_conv, x, out=memory.empty((*x.shape[:-1], 2 * channels), x.dtype))
            memory.free(x)
            # Channels are those of a frame, then of the one after it.
            x = memory.empty((batch, 2 * frames, rows, columns, channels), x.dtype)
            x.view(batch, frames, 2, rows, columns, channels).copy_(pairs.unflatten(-1, (2, -1)).movedim(-2, 2))
            memory.free(pairs)
        batch, frames, rows, columns, _ = x.shape
        out = residual
        if out is None:
            out = memory.empty((batch, frames, 2 * rows, 2 * columns, self.conv.out_channels), x.dtype)
        self.conv(x.flatten(0, 1), residual=None if residual is None else residual.flatten(0, 1), out=out.flatten(0, 1))
        memory.free(x)
        return out


class WanDownStage:
    """Residual blocks of one size, then the step to the next, with a shortcut around them in Wan 2.2."""

    def __init__(self, resnets: list[ResidualBlock], step: Downsampler | None, out_channels: int | None) -> None:
        """Make a stage; `out_channels` are those of the shortcut, None for none."""
        self.resnets, self.step, self.shortcut_channels = resnets, step, out_channels

    def __call__(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        residual = None
        if self.shortcut_channels is not None:
            halves_time = self.step is not None and self.step.time_conv is not None
            residual = average(x, self.shortcut_channels, 2 if halves_time else 1, 1 if self.step is None else 2)
        for resnet in self.resnets:
            x = resnet(x, history, memory)
        if self.step is not None:
            return self.step(x, history, memory, residual=residual)
        return x if residual is None else add(x, residual, out=x)


class WanUpStage:
    """Residual blocks of one size, then the step to the next, with a shortcut around them in Wan 2.2."""

    def __init__(self, resnets: list[ResidualBlock], step: Upsampler | None, *, has_shortcut: bool) -> None:
        self.resnets, self.step, self.has_shortcut = resnets, step, has_shortcut and step is not None

    def __call__(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        residual = None
        if self.step is not None and self.has_shortcut:
            time_factor = 1 if self.step.time_conv is None or history.is_first else 2
            residual = self._repeated(x, time_factor, memory)
        for resnet in self.resnets:
            x = resnet(x, history, memory)
        return x if self.step is None else self.step(x, history, memory, residual=residual)

    def _repeated(self, x: Tensor, time_factor: int, memory: FeatureMemory) -> Tensor:
        """Return x in the size of the stage's result: a pixel's channels are dealt out over the pixels it becomes."""
        assert self.step is not None
        batch, frames, rows, columns, channels = x.shape
        out_channels = self.step.conv.out_channels
        stored_time = 1 if self.step.time_conv is None else 2
        source = (torch.arange(out_channels * stored_time * 4, device=x.device) * channels).div(
            out_channels * stored_time * 4, rounding_mode="floor"
        )
        source = source.view(out_channels, stored_time, 2, 2)[:, stored_time - time_factor :]
        shape = (batch, frames * time_factor, 2 * rows, 2 * columns, out_channels)
        out = memory.empty(shape, x.dtype)
        for t in range(time_factor):
            for row in range(2):
                for column in range(2):
                    out[:, t::time_factor, row::2, column::2] = x[..., source[:, t, row, column]]
        return out


def average(x: Tensor, out_channels: int, time_factor: int, factor: int) -> Tensor:
    """Return x with fewer pixels and frames: groups of neighbouring pixels and channels are averaged."""
    missing = -x.shape[1] % time_factor
    if missing:
        x = torch.cat((x.new_zeros(x.shape[0], missing, *x.shape[2:]), x), dim=1)
    batch, frames, rows, columns, channels = x.shape
    cubes = x.view(
        batch, frames // time_factor, time_factor, rows // factor, factor, columns // factor, factor, channels
    )
    values = cubes.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4).unflatten(4, (out_channels, -1))
    return values.float().mean(-1).to(x.dtype)


MIN_SIDE, SIDE_STEP = 64, 32  # of automatic tiles, in pixels of the network's largest maps

PieceNetwork = Callable[[Tensor, FrameHistory, FeatureMemory], Tensor]


def pieces_of(x_BTHWC: Tensor, num_frames: int) -> Iterator[tuple[Tensor, FrameHistory]]:
    """Yield the first frame, then `num_frames` at a time, with the history of the pieces before."""
    history = FrameHistory()
    total = x_BTHWC.shape[1]
    for begin in (0, *range(1, total, num_frames)):
        end = begin + num_frames if begin else 1
        history.is_first, history.is_last = begin == 0, end >= total
        yield x_BTHWC[:, begin:end].contiguous(), history


def spans_of(length: int, side: int, reach: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Yield the computed and the read span of each part of an axis; all begin at multiples of `step`."""
    side, reach = -(-side // step) * step, -(-reach // step) * step
    for begin in range(0, length, side):
        end = min(begin + side, length)
        yield slice(begin, end), slice(max(begin - reach, 0), min(end + reach, length))


def in_tiles(
    network: PieceNetwork, x_BTHWC: Tensor, *, num_frames: int, side: int, reach: int, step: int, growth: Fraction
) -> Tensor:
    """Return the network's result for a clip, computed in tiles of `side` pixels, each with `reach` pixels around it.

    Pieces have `num_frames` frames. A pixel becomes `growth` pixels in rows and columns; tiles begin at multiples of
    `step`.
    """
    result: Tensor | None = None
    _, _, height, width, _ = x_BTHWC.shape
    memory = FeatureMemory()

    def grown(span: slice, origin: int = 0) -> slice:
        return slice(int((span.start - origin) * growth), int((span.stop - origin) * growth))

    for rows, seen_rows in spans_of(height, side, reach, step):
        for columns, seen_columns in spans_of(width, side, reach, step):
            here = (slice(None), slice(None), grown(rows, seen_rows.start), grown(columns, seen_columns.start))
            tile = x_BTHWC[:, :, seen_rows, seen_columns].clone(memory_format=torch.contiguous_format)
            clip = torch.cat(
                [
                    copied_out(memory, network(piece, history, memory), here)
                    for piece, history in pieces_of(tile, num_frames)
                ],
                dim=1,
            )
            if result is None:
                result = clip.new_empty(*clip.shape[:2], int(height * growth), int(width * growth), clip.shape[-1])
            result[:, :, grown(rows), grown(columns)] = clip
    assert result is not None
    return result


def copied_out(memory: FeatureMemory, result: Tensor, part: tuple[slice, ...] = ()) -> Tensor:
    """Return a copy of a result, or of a part of it, and free its memory."""
    copy = result[part].clone(memory_format=torch.contiguous_format)
    memory.free(result)
    return copy


def chosen_side(
    pixels: int, batch: int, widths: Sequence[int], num_resnets: int, num_frames: int, reach: int, itemsize: int
) -> int | None:
    """Return the side of tiles that fit into memory, in pixels of the largest maps; None if the whole fits.

    `widths` are the channels of the stages, from the largest maps on; a piece has `num_frames` there. Counted are three
    maps of a stage, and two frames for each of its convolutions.
    """
    maps = 3 * num_frames * widths[0]
    kept = sum(4 * num_resnets * width / 4**i for i, width in enumerate(widths)) if num_frames > 1 else 0
    pixel_bytes = batch * itemsize * (maps + kept)
    budget = memory_budget()
    if pixels * pixel_bytes <= budget:
        return None
    side = math.isqrt(int(budget / pixel_bytes)) - 2 * reach
    return max(side // SIDE_STEP * SIDE_STEP, MIN_SIDE)
