"""Weights that are packed for the convolution kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.ops.conv3d import ConvWeight as PackedConv
from tilewright.ops.conv3d import UpsampleWeight as PackedUpsample
from tilewright.ops.conv3d import pack_conv, pack_upsample_conv
from tilewright.weights.spec import Reader, Source, Weight


class ConvWeight(Weight[PackedConv]):
    """A convolution [O, C, *kernel] with a bias [O], its taps side by side as one product; one axis is that of rows."""

    def __init__(self, name: str, out_channels: int, in_channels: int, kernel: tuple[int, ...]) -> None:
        shape = (out_channels, in_channels, *kernel)
        super().__init__([Source(f"{name}.weight", shape), Source(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = pack_conv(weight[..., None] if weight.dim() == 3 else weight, bias, dtype=dtype)


class TransposedConvWeight(Weight[PackedConv]):
    """A transposed convolution over time [C, O, taps * stride] with a bias [O], as one to stride * O channels.

    What comes out at a place are the `stride` rows of the result that begin there: row r of place t is the sum over i
    of x[t - i] times the weight at i * stride + r.
    """

    def __init__(self, name: str, in_channels: int, out_channels: int, taps: int, stride: int) -> None:
        shape = (in_channels, out_channels, taps * stride)
        super().__init__([Source(f"{name}.weight", shape), Source(f"{name}.bias", (out_channels,))])
        self.taps, self.stride = taps, stride

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        in_channels, out_channels, _ = weight.shape
        by_tap = weight.reshape(in_channels, out_channels, self.taps, self.stride).flip(2)  # the oldest first
        rows = by_tap.permute(3, 1, 0, 2).reshape(self.stride * out_channels, in_channels, self.taps, 1)
        self._value = pack_conv(rows, bias.repeat(self.stride), dtype=dtype)


class UpsampleWeight(Weight[PackedUpsample]):
    """A convolution [O, C, 3, 3] with a bias [O] that reads a picture twice as high and wide, every pixel repeated."""

    def __init__(self, name: str, out_channels: int, in_channels: int) -> None:
        shape = (out_channels, in_channels, 3, 3)
        super().__init__([Source(f"{name}.weight", shape), Source(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = pack_upsample_conv(weight, bias, dtype=dtype)
