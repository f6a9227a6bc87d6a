"""Convolutions over time of streams [B, T, C] that come in pieces: each layer's last rows are carried to the next one.

A piece's result is then the same, bit for bit, as if the stream came whole. B streams, T rows, C channels. Every rank
has them whole, as those of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.conv3d import conv2d
from tilewright.weights.conv import ConvWeight, TransposedConvWeight
from tilewright.weights.unpacked import ConvTaps, Unpacked


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

    def joined(self, layer: object, x_BTC: Tensor, num_before: int, *, zeros: bool) -> Tensor:
        """x behind the rows before it, up to `num_before`; the last so many are carried on.

        At a stream's beginning there are none, or as many rows of zeros.
        """
        before = self._before(layer, x_BTC, num_before if zeros else 0)
        joined = torch.cat((before, x_BTC), dim=1)
        for stream, rows in zip(self._streams, joined, strict=True):
            stream.rows[layer] = rows[max(len(rows) - num_before, 0) :].clone()
        return joined

    def _before(self, layer: object, x_BTC: Tensor, num_zeros: int) -> Tensor:
        if layer not in self._streams[0].rows:
            return x_BTC.new_zeros(x_BTC.shape[0], num_zeros, x_BTC.shape[2])
        return torch.stack([stream.rows[layer] for stream in self._streams])


class CausalConv1d:
    """A convolution that sees `(kernel - 1) * dilation` rows before its own, zeros where the stream begins."""

    def __init__(self, name: str, in_channels: int, out_channels: int, kernel: int, *, dilation: int = 1) -> None:
        self.kernel, self.dilation, self.out_channels = kernel, dilation, out_channels
        self.weight = ConvWeight(name, out_channels, in_channels, (kernel,))

    def __call__(self, x_BTC: Tensor, pieces: Pieces, *, residual: Tensor | None = None) -> Tensor:
        """conv(x) + residual, [B, T, O]. Rows of the stream are those of a picture, and each of the `dilation` phases is a
        column of it: they do not mix.
        """
        assert residual is None or self.dilation == 1
        batch, length, channels = x_BTC.shape
        if self.kernel > 1:
            x_BTC = pieces.joined(self, x_BTC, (self.kernel - 1) * self.dilation, zeros=True)
        if x_BTC.shape[1] % self.dilation:
            x_BTC = torch.nn.functional.pad(x_BTC, (0, 0, 0, -x_BTC.shape[1] % self.dilation))
        columns = x_BTC.view(batch, -1, self.dilation, channels)
        if residual is not None:
            residual = residual.view(batch, -1, 1, self.out_channels)
        out = conv2d(columns, self.weight.value, residual=residual)
        return out.reshape(batch, -1, self.out_channels)[:, :length]


class TransposedConv1d:
    """A transposed convolution, which makes `stride` rows of each: those that no later row will change, and only those
    that have all the rows they are made of. Of a whole stream that leaves out (taps - 1) * stride rows at either end.
    """

    def __init__(self, name: str, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        assert kernel % stride == 0, f"a kernel of {kernel} is no multiple of the stride, {stride}"
        self.taps, self.stride, self.out_channels = kernel // stride, stride, out_channels
        self.weight = TransposedConvWeight(name, in_channels, out_channels, self.taps, stride)

    def __call__(self, x_BTC: Tensor, pieces: Pieces) -> Tensor:
        x_BTC = pieces.joined(self, x_BTC, self.taps - 1, zeros=False)
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


class Snake:
    """x + sin(a x)^2 / b, where the checkpoint has log a and log b of each channel."""

    EPS = 1e-9  # keeps b from 0

    def __init__(self, name: str, channels: int) -> None:
        self.alpha = Unpacked(f"{name}.alpha", channels, in_fp32=True)
        self.beta = Unpacked(f"{name}.beta", channels, in_fp32=True)

    def __call__(self, x_BTC: Tensor) -> Tensor:
        scale, inverse = self.alpha.value.exp(), 1 / (self.beta.value.exp() + self.EPS)
        wave = torch.sin(x_BTC.float() * scale).square_().mul_(inverse)
        return wave.add_(x_BTC).to(x_BTC.dtype)
