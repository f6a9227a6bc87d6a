"""Convolutions of pictures and clips, channels last: each knows its padding, and may upsample what it reads.

B pictures or clips, T frames, H rows, W columns, C channels. Every rank has them whole: autoencoders are not split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.layers.group_norm import NormTable
from tilewright.ops.conv3d import conv2d, conv3d, upsample_conv2d
from tilewright.weights.conv import ConvWeight, UpsampleWeight

Padding = tuple[int, int, int, int]  # rows above and below, columns to the left and right


class Conv2d:
    """A convolution of pictures [B, H, W, C]; `padding` keeps their size unless said."""

    def __init__(
        self,
        name: str,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: Padding | None = None,
    ) -> None:
        self.in_channels, self.out_channels, self.stride = in_channels, out_channels, stride
        self.padding: Padding = padding or (kernel // 2,) * 4
        self.weight = ConvWeight(name, out_channels, in_channels, (kernel, kernel))

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.value.packed.dtype

    def __call__(
        self,
        x_BHWC: Tensor,
        *,
        norm: NormTable | None = None,
        padding: Padding | None = None,
        activation: str = "none",
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """activation(conv(norm(x))) + residual.

        `padding`: of a part of a picture, with neighbours where the whole has zeros.
        """
        return conv2d(
            x_BHWC,
            self.weight.value,
            stride=(self.stride, self.stride),
            padding=self.padding if padding is None else padding,
            activation=activation,
            residual=residual,
            norm=None if norm is None else norm.table,
            norm_activation="none" if norm is None else norm.activation,
            out=out,
        )


class UpsampleConv2d:
    """A convolution of pictures [B, H, W, C] made twice as high and wide, every pixel repeated."""

    def __init__(self, name: str, in_channels: int, out_channels: int) -> None:
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = UpsampleWeight(name, out_channels, in_channels)

    def __call__(
        self,
        x_BHWC: Tensor,
        *,
        rows: tuple[int, int] | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """conv(x) + residual, [B, 2 H, 2 W, O]; `rows`: what those rows [begin, end) of x become."""
        return upsample_conv2d(x_BHWC, self.weight.value, rows=rows, residual=residual, out=out)


class CausalConv3d:
    """A convolution of clips [B, T, H, W, C] that sees no later frame; rows and columns keep their number.

    A clip may come in pieces: `previous` is what came before, and zeros stand in its place at the beginning.
    """

    def __init__(
        self,
        name: str,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        *,
        time_stride: int = 1,
    ) -> None:
        self.in_channels, self.out_channels, self.kernel = in_channels, out_channels, kernel
        self.time_stride = time_stride
        self.weight = ConvWeight(name, out_channels, in_channels, kernel)

    @property
    def num_previous(self) -> int:
        """Frames before a piece that it reads, beside those its stride leaves over."""
        return self.kernel[0] - self.time_stride

    def __call__(
        self,
        x_BTHWC: Tensor,
        previous: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        rows, columns = self.kernel[1] // 2, self.kernel[2] // 2
        return conv3d(
            x_BTHWC,
            self.weight.value,
            stride=(self.time_stride, 1, 1),
            padding=(rows, rows, columns, columns),
            time_padding=self.num_previous,
            previous=previous,
            residual=residual,
            out=out,
        )
