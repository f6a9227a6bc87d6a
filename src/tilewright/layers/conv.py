"""Convolutions of images and clips, channels last, and over time of streams that come in pieces.

Each convolution of images has its padding and may upsample its input: B images or clips, T frames, H rows, W
columns, C channels. A layer of a stream [B, T, C] carries its last rows over to the next piece, so that the result is
the same, bit for bit, as for the whole stream. Every rank has them whole: autoencoders and codecs are not split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.layers.norm import NormTable
from tilewright.ops.activation import snake
from tilewright.ops.conv import conv2d, conv3d, upsample_conv2d
from tilewright.ops.plan import empty
from tilewright.weights.conv import ConvTaps, ConvWeight, SnakeWaves, TransposedConvWeight, Unpacked, UpsampleWeight

Padding = tuple[int, int, int, int]  # rows above and below, columns to the left and right


class Conv2d:
    """A convolution of images [B, H, W, C]; the default `padding` keeps their size."""

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
        """Return activation(conv(norm(x))) + residual.

        `padding` replaces the layer's, for a part of an image that has neighbours where the whole has zeros.
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
    """A convolution of images [B, H, W, C] after nearest-neighbour upsampling by two."""

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
        """Return conv(x) + residual, [B, 2 H, 2 W, O]; `rows`: only the output of the rows [begin, end) of x."""
        return upsample_conv2d(x_BHWC, self.weight.value, rows=rows, residual=residual, out=out)


class CausalConv3d:
    """A convolution of clips [B, T, H, W, C] that sees no later frame and keeps their rows and columns.

    A clip may come in pieces: `previous` are the frames before, zeros at the beginning.
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
        """Frames before a piece that it reads, apart from those its stride leaves over."""
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


class StreamState:
    """State of one stream between pieces: for each layer the rows it reads again."""

    def __init__(self) -> None:
        self.rows: dict[object, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


class Pieces:
    """The next pieces of several streams, of equal length, while they go through a network."""

    def __init__(self, states: Sequence[StreamState]) -> None:
        self._states = states

    def joined(
        self,
        layer: object,
        x_BTC: Tensor,
        num_before: int,
        *,
        zeros: bool,
        multiple: int = 1,
        snake: Snake | None = None,
    ) -> Tensor:
        """Return x, or snake(x), after up to `num_before` rows before it; keep the last ones for the next piece.

        At the beginning of a stream there are none, or as many rows of zeros. x is padded with zeros to a `multiple` of
        rows.
        """
        batch, length, channels = x_BTC.shape
        first = self._states[0].rows.get(layer)
        num_earlier = len(first) if first is not None else num_before if zeros else 0
        end = num_earlier + length
        joined = empty((batch, end + -end % multiple, channels), x_BTC.dtype)
        new = joined[:, num_earlier:end]
        if snake is None:
            new.copy_(x_BTC)
        else:
            snake(x_BTC, out=new)
        joined[:, end:].zero_()
        for state, rows in zip(self._states, joined, strict=True):
            if layer in state.rows:
                rows[:num_earlier] = state.rows[layer]
            else:
                rows[:num_earlier].zero_()
            state.rows[layer] = rows[max(end - num_before, 0) : end].clone()
        return joined


class Snake:
    """x + sin(a x)^2 / b, where the checkpoint has log a and log b of each channel."""

    def __init__(self, name: str, channels: int) -> None:
        self.waves = SnakeWaves(name, channels)

    def __call__(self, x_BTC: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the result; `out` may be x, or rows of a longer stream."""
        return snake(x_BTC, *self.waves.value, out=out)


class CausalConv1d:
    """A convolution that sees `(kernel - 1) * dilation` rows before its own, zeros before the stream begins."""

    def __init__(self, name: str, in_channels: int, out_channels: int, kernel: int, *, dilation: int = 1) -> None:
        self.kernel, self.dilation, self.out_channels = kernel, dilation, out_channels
        self.weight = ConvWeight(name, out_channels, in_channels, (kernel,))

    def __call__(self, x_BTC: Tensor, pieces: Pieces, *, snake: Snake | None = None) -> Tensor:
        """Return conv(x), or conv(snake(x)), [B, T, O].

        It is computed as a convolution of an image whose columns are the `dilation` phases, which do not mix.
        """
        batch, length, channels = x_BTC.shape
        num_before = (self.kernel - 1) * self.dilation
        x_BTC = pieces.joined(self, x_BTC, num_before, zeros=True, multiple=self.dilation, snake=snake)
        out = conv2d(x_BTC.view(batch, -1, self.dilation, channels), self.weight.value)
        return out.view(batch, -1, self.out_channels)[:, :length]


class PointwiseConv1d:
    """A convolution of single rows, added to another stream."""

    def __init__(self, name: str, in_channels: int, out_channels: int) -> None:
        self.weight = ConvWeight(name, out_channels, in_channels, (1,))

    def __call__(self, x_BTC: Tensor, residual_BTO: Tensor) -> Tensor:
        """Add conv(x) to the residual and return it."""
        residual = residual_BTO[:, :, None]
        conv2d(x_BTC[:, :, None], self.weight.value, residual=residual, out=residual)
        return residual_BTO


class TransposedConv1d:
    """A transposed convolution that makes `stride` rows of each row.

    It returns only rows that have all their inputs and that no later row changes: of a whole stream that leaves out
    (taps - 1) * stride rows at either end.
    """

    def __init__(self, name: str, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        assert kernel % stride == 0, f"a kernel of {kernel} is not a multiple of the stride, {stride}"
        self.taps, self.stride, self.out_channels = kernel // stride, stride, out_channels
        self.weight = TransposedConvWeight(name, in_channels, out_channels, self.taps, stride)

    def __call__(self, x_BTC: Tensor, pieces: Pieces, *, snake: Snake | None = None) -> Tensor:
        x_BTC = pieces.joined(self, x_BTC, self.taps - 1, zeros=False, snake=snake)
        batch, length, _ = x_BTC.shape
        if length < self.taps:
            return x_BTC.new_empty(batch, 0, self.out_channels)
        out = conv2d(x_BTC[:, :, None], self.weight.value)
        return out.reshape(batch, -1, self.out_channels)


class DepthwiseConv1d:
    """A causal depthwise convolution. With few products per channel, its weight is not packed."""

    def __init__(self, name: str, channels: int, kernel: int) -> None:
        self.kernel = kernel
        self.taps = ConvTaps(name, channels, kernel)
        self.bias = Unpacked(f"{name}.bias", channels)

    def __call__(self, x_BTC: Tensor, pieces: Pieces) -> Tensor:
        length = x_BTC.shape[1]
        x_BTC = pieces.joined(self, x_BTC, self.kernel - 1, zeros=True).float()
        out = self.bias.value.float().expand_as(x_BTC[:, :length]).clone()
        for i, tap in enumerate(self.taps.value.float()):
            out += x_BTC[:, i : i + length] * tap
        return out.to(self.bias.value.dtype)
