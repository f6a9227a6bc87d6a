"""Weights that are packed for the convolution kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.ops.conv3d import ConvWeight as PackedConv
from tilewright.ops.conv3d import UpsampleWeight as PackedUpsample
from tilewright.ops.conv3d import pack_conv, pack_upsample_conv
from tilewright.weights.spec import Reader, Source, Weight


class ConvWeight(Weight[PackedConv]):
    """A convolution [O, C, *kernel] of two or three axes with a bias [O], its taps side by side as one product."""

    def __init__(self, name: str, out_channels: int, in_channels: int, kernel: tuple[int, ...]) -> None:
        shape = (out_channels, in_channels, *kernel)
        super().__init__([Source(f"{name}.weight", shape), Source(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = pack_conv(weight, bias, dtype=dtype)


class UpsampleWeight(Weight[PackedUpsample]):
    """A convolution [O, C, 3, 3] with a bias [O] that reads a picture twice as high and wide, every pixel repeated."""

    def __init__(self, name: str, out_channels: int, in_channels: int) -> None:
        shape = (out_channels, in_channels, 3, 3)
        super().__init__([Source(f"{name}.weight", shape), Source(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = pack_upsample_conv(weight, bias, dtype=dtype)
