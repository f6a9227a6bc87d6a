"""Convolutions over time of streams [B, T, C] that come in pieces: each layer's last rows are carried to the next one.

A piece's result is then the same, bit for bit, as if the stream came whole. B streams, T rows, C channels. Every rank
has them whole, as those of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.ops.activation import snake
from tilewright.ops.conv3d import conv2d
from tilewright.ops.plan import empty
from tilewright.weights.conv import ConvWeight, TransposedConvWeight
from tilewright.weights.unpacked import ConvTaps, SnakeWaves, Unpacked


class Stream:
    """What one stream carries from piece to piece: of each layer the rows that it will look back at."""

    def __init__(self) -> None:
        self.rows: dict[object, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


class Pieces:
    """The next pieces of several streams, as long as each other, while they go through a network."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams

    def joined(
        self,
        layer: object,
        x_BTC: Tensor,
        num_before: int,
        *,
        zeros: bool,
        multiple: int = 1,
        bend: Snake | None = None,
    ) -> Tensor:
        """x, or bend(x), behind the rows before it, up to `num_before`; the last so many are carried on.

        At a stream's beginning there are none, or as many rows of zeros. Behind x are zeros up to a `multiple` of rows.
        """
        batch, length, channels = x_BTC.shape
        first = self._streams[0].rows.get(layer)
        num_earlier = len(first) if first is not None else num_before if zeros else 0
        end = num_earlier + length
        joined = empty((batch, end + -end % multiple, channels), x_BTC.dtype)
        new = joined[:, num_earlier:end]
        if bend is None:
            new.copy_(x_BTC)
        else:
            bend(x_BTC, out=new)
        joined[:, end:].zero_()
        for stream, rows in zip(self._streams, joined, strict=True):
            if layer in stream.rows:
                rows[:num_earlier] = stream.rows[layer]
            else:
                rows[:num_earlier].zero_()
            stream.rows[layer] = rows[max(end - num_before, 0) : end].clone()
        return joined


class Snake:
    """x + sin(a x)^2 / b, where the checkpoint has log a and log b of each channel."""

    def __init__(self, name: str, channels: int) -> None:
        self.waves = SnakeWaves(name, channels)

    def __call__(self, x_BTC: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`out` may be x, or rows of a longer stream."""
        return snake(x_BTC, *self.waves.value, out=out)


class CausalConv1d:
    """A convolution that sees `(kernel - 1) * dilation` rows before its own, zeros where the stream begins."""

    def __init__(self, name: str, in_channels: int, out_channels: int, kernel: int, *, dilation: int = 1) -> None:
        self.kernel, self.dilation, self.out_channels = kernel, dilation, out_channels
        self.weight = ConvWeight(name, out_channels, in_channels, (kernel,))

    def __call__(self, x_BTC: Tensor, pieces: Pieces, *, bend: Snake | None = None) -> Tensor:
        """conv(x), or conv(bend(x)), [B, T, O]. Rows of the stream are those of a picture, and each of the `dilation`
        phases is a column of it: they do not mix.
        """
        batch, length, channels = x_BTC.shape
        num_before = (self.kernel - 1) * self.dilation
        x_BTC = pieces.joined(self, x_BTC, num_before, zeros=True, multiple=self.dilation, bend=bend)
        out = conv2d(x_BTC.view(batch, -1, self.dilation, channels), self.weight.value)
        return out.view(batch, -1, self.out_channels)[:, :length]


class PointwiseConv1d:
    """A convolution of each row for itself, which is added to another stream."""

    def __init__(self, name: str, in_channels: int, out_channels: int) -> None:
        self.weight = ConvWeight(name, out_channels, in_channels, (1,))

    def __call__(self, x_BTC: Tensor, residual_BTO: Tensor) -> Tensor:
        """residual, after conv(x) is added to it."""
        residual = residual_BTO[:, :, None]
        conv2d(x_BTC[:, :, None], self.weight.value, residual=residual, out=residual)
        return residual_BTO


class TransposedConv1d:
    """A transposed convolution, which makes `stride` rows of each: those that no later row will change, and only those
    that have all the rows they are made of. Of a whole stream that leaves out (taps - 1) * stride rows at either end.
    """

    def __init__(self, name: str, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        assert kernel % stride == 0, f"a kernel of {kernel} is no multiple of the stride, {stride}"
        self.taps, self.stride, self.out_channels = kernel // stride, stride, out_channels
        self.weight = TransposedConvWeight(name, in_channels, out_channels, self.taps, stride)

    def __call__(self, x_BTC: Tensor, pieces: Pieces, *, bend: Snake | None = None) -> Tensor:
        x_BTC = pieces.joined(self, x_BTC, self.taps - 1, zeros=False, bend=bend)
        batch, length, _ = x_BTC.shape
        if length < self.taps:
            return x_BTC.new_empty(batch, 0, self.out_channels)
        out = conv2d(x_BTC[:, :, None], self.weight.value)
        return out.reshape(batch, -1, self.out_channels)


class DepthwiseConv1d:
    """A causal convolution of each channel for itself: few products of a channel, so no packed weight."""

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
