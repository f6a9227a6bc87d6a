"""Weights that are packed for the convolution kernels, and weights that stay plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.conv import PackedConvWeight as PackedConv
from tilewright.ops.conv import PackedUpsampleWeight as PackedUpsample
from tilewright.ops.conv import pack_conv, pack_upsample_conv
from tilewright.ops.linear import PACK_BLOCK_BYTES
from tilewright.ops.plan import empty_in_huge_pages
from tilewright.weights.spec import Reader, Shard, Weight, WeightSource


class ConvWeight(Weight[PackedConv]):
    """A convolution [O, C, *kernel] with bias [O], its taps concatenated into one product.

    A kernel of one axis is along rows.
    """

    def __init__(self, name: str, out_channels: int, in_channels: int, kernel: tuple[int, ...]) -> None:
        shape = (out_channels, in_channels, *kernel)
        super().__init__([WeightSource(f"{name}.weight", shape), WeightSource(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = pack_conv(weight[..., None] if weight.dim() == 3 else weight, bias, dtype=dtype)


class TransposedConvWeight(Weight[PackedConv]):
    """A transposed convolution over time [C, O, taps * stride] with bias [O], as a convolution to stride * O channels.

    The result at row t are the `stride` output rows that begin there: output row r of t is the sum over i of x[t - i]
    times the weight at i * stride + r.
    """

    def __init__(self, name: str, in_channels: int, out_channels: int, taps: int, stride: int) -> None:
        shape = (in_channels, out_channels, taps * stride)
        super().__init__([WeightSource(f"{name}.weight", shape), WeightSource(f"{name}.bias", (out_channels,))])
        self.taps, self.stride = taps, stride

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        in_channels, out_channels, _ = weight.shape
        by_tap = weight.reshape(in_channels, out_channels, self.taps, self.stride).flip(2)  # the oldest first
        rows = by_tap.permute(3, 1, 0, 2).reshape(self.stride * out_channels, in_channels, self.taps, 1)
        self._value = pack_conv(rows, bias.repeat(self.stride), dtype=dtype)


class UpsampleWeight(Weight[PackedUpsample]):
    """A convolution [O, C, 3, 3] with bias [O] of an image upsampled by two, every pixel repeated."""

    def __init__(self, name: str, out_channels: int, in_channels: int) -> None:
        shape = (out_channels, in_channels, 3, 3)
        super().__init__([WeightSource(f"{name}.weight", shape), WeightSource(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = pack_upsample_conv(weight, bias, dtype=dtype)


class Unpacked(Weight[Tensor]):
    """A tensor as it is: norms, position tables, an embedding table that is not tied.

    `in_fp32`: in fp32 whatever the model's type, for few values with large effects. `shard` is this rank's part of the
    first axis.
    """

    def __init__(self, name: str, *shape: int, in_fp32: bool = False, shard: Shard | None = None) -> None:
        super().__init__([WeightSource(name, shape, (shard,))])
        self.in_fp32 = in_fp32

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        (reader,) = readers
        if self.in_fp32:
            dtype = torch.float32
        value = empty_in_huge_pages(math.prod(reader.shape), dtype).view(reader.shape)
        if not reader.shape:
            value.copy_(reader.read())
        else:
            block_rows = max(PACK_BLOCK_BYTES // max(math.prod(reader.shape[1:]) * 4, 1), 1)
            for begin in range(0, reader.shape[0], block_rows):
                end = min(begin + block_rows, reader.shape[0])
                value[begin:end] = reader.rows(begin, end)
        self._value = value


class ConvTaps(Weight[Tensor]):
    """A depthwise convolution over time, [C, 1, W] in the checkpoint, as [W, C].

    `shard` are this rank's channels.
    """

    def __init__(self, name: str, channels: int, taps: int, shard: Shard | None = None) -> None:
        super().__init__([WeightSource(f"{name}.weight", (channels, 1, taps), (shard,))])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        self._value = readers[0].read()[:, 0].t().to(backend.device(), dtype).contiguous()


class SnakeWaves(Weight[tuple[Tensor, Tensor]]):
    """a and 1 / b of each channel, fp32 whatever the model's type; the checkpoint has log a and log b."""

    EPS = 1e-9  # keeps b from 0

    def __init__(self, name: str, channels: int) -> None:
        super().__init__([WeightSource(f"{name}.{part}", (channels,)) for part in ("alpha", "beta")])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        alpha, beta = (reader.read().to(backend.device(), torch.float32) for reader in readers)
        self._value = alpha.exp(), 1 / (beta.exp() + self.EPS)
