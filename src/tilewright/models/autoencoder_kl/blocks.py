"""The blocks of AutoencoderKL: a picture [1, H, W, C], normed over all its pixels.

A convolution norms what it reads (`NormTable`), so that no map is kept but those that are read twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.layers.conv import Conv2d, UpsampleConv2d
from tilewright.layers.feature_memory import FeatureMemory
from tilewright.layers.group_norm import GroupNorm, NormTable
from tilewright.layers.linear import Linear
from tilewright.ops.attention import varlen_attention

EPS = 1e-6


class ResnetBlock:
    """shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x)))))), where the shortcut is x if it has as many channels."""

    def __init__(self, name: str, in_channels: int, out_channels: int, num_groups: int) -> None:
        self.norm1 = GroupNorm(f"{name}.norm1", in_channels, num_groups, EPS, activation="silu")
        self.conv1 = Conv2d(f"{name}.conv1", in_channels, out_channels)
        self.norm2 = GroupNorm(f"{name}.norm2", out_channels, num_groups, EPS, activation="silu")
        self.conv2 = Conv2d(f"{name}.conv2", out_channels, out_channels)
        self.shortcut = (
            Conv2d(f"{name}.conv_shortcut", in_channels, out_channels, 1) if in_channels != out_channels else None
        )

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        """Its memory is the block's from then on: what comes out may lie there."""
        shape = (*x.shape[:-1], self.conv1.out_channels)
        inner = self.conv1(x, norm=self.norm1.table(self.norm1.statistics(x)), out=memory.take(shape, x.dtype))
        out = x
        if self.shortcut is not None:
            out = self.shortcut(x, out=memory.take(shape, x.dtype))
            memory.give(x)
        return self._finish(inner, out, memory)

    def upsampled(self, x: Tensor, step: UpsampleConv2d, band_rows: int, memory: FeatureMemory) -> Tensor:
        """The same of step(x), which is never whole in memory: it is computed twice, in bands of rows.

        The first time for its statistics, the second for what the block makes of it.
        """
        _, rows, columns, _ = x.shape
        shape = (1, 2 * rows, 2 * columns, self.conv1.out_channels)
        bands = list(bands_of(rows, max(band_rows // 2, 1)))
        inner = memory.take(shape, x.dtype)
        # What is read by nobody yet is room for a band.
        largest = memory.take((1, 2 * (bands[0][1] + 2), 2 * columns, step.out_channels), x.dtype)

        def band_of(begin: int, end: int) -> Tensor:
            return step(x, rows=(begin, end), out=largest[:, : 2 * (end - begin)])

        norm = self.norm1.table(
            merged_statistics([(end - begin, self.norm1.statistics(band_of(begin, end))) for begin, end in bands])
        )
        out = memory.take(shape, x.dtype)
        for begin, end in bands:
            self._enter_band(band_of(max(begin - 1, 0), min(end + 1, rows)), (begin, end), rows, norm, inner, out)
        memory.give(largest)
        memory.give(x)
        return self._finish(inner, out, memory)

    def _enter_band(
        self, band: Tensor, rows: tuple[int, int], num_rows: int, norm: NormTable, inner: Tensor, out: Tensor
    ) -> None:
        """conv1 and the shortcut of what the rows of x became, and of two rows more on each side that has them."""
        begin, end = rows
        top, bottom = int(begin == 0), int(end == num_rows)
        here = slice(2 * begin, 2 * end)
        own = band[:, 2 * (1 - top) : band.shape[1] - 2 * (1 - bottom)]
        seen = band[:, 1 - top : band.shape[1] - 1 + bottom]
        self.conv1(seen, norm=norm, padding=(top, bottom, 1, 1), out=inner[:, here])
        if self.shortcut is None:
            out[:, here] = own
        else:
            self.shortcut(own, out=out[:, here])

    def _finish(self, inner: Tensor, out: Tensor, memory: FeatureMemory) -> Tensor:
        self.conv2(inner, norm=self.norm2.table(self.norm2.statistics(inner)), residual=out, out=out)
        memory.give(inner)
        return out


def bands_of(rows: int, band_rows: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each band of so many rows; the last one may have fewer."""
    for begin in range(0, rows, band_rows):
        yield begin, min(begin + band_rows, rows)


def merged_statistics(parts: list[tuple[int, Tensor]]) -> Tensor:
    """Mean and variance [B, G, 2] of all, from those of parts, of which each counts as given."""
    counts = torch.tensor([count for count, _ in parts], dtype=torch.float64, device=parts[0][1].device)
    shares = (counts / counts.sum())[:, None, None]
    means, variances = torch.stack([statistics for _, statistics in parts]).double().unbind(-1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return torch.stack((mean, variance), dim=-1).float()


class AttentionBlock:
    """x + attention over all pixels of a picture, with one head as wide as the channels."""

    def __init__(self, name: str, channels: int, num_groups: int) -> None:
        self.norm = GroupNorm(f"{name}.group_norm", channels, num_groups, EPS)
        self.qkv = Linear([(f"{name}.to_{part}", channels) for part in "qkv"], channels, bias=True)
        self.output = Linear([(f"{name}.to_out.0", channels)], channels, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        channels = x.shape[-1]
        x_ND = x.view(-1, channels)
        q, k, v = self.qkv(self.norm(x).view(-1, channels)).view(-1, 3, channels).split(1, dim=1)
        starts = torch.tensor([0, len(x_ND)], dtype=torch.int32, device=x.device)
        attended = varlen_attention(q, k, v, starts)
        self.output(attended.view(-1, channels), residual=x_ND, out=x_ND)
        return x


class MidBlock:
    def __init__(self, name: str, channels: int, num_groups: int, has_attention: bool) -> None:
        self.first = ResnetBlock(f"{name}.resnets.0", channels, channels, num_groups)
        self.attention = AttentionBlock(f"{name}.attentions.0", channels, num_groups) if has_attention else None
        self.second = ResnetBlock(f"{name}.resnets.1", channels, channels, num_groups)

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        x = self.first(x, memory)
        if self.attention is not None:
            x = self.attention(x)
        return self.second(x, memory)


def resnets_of(name: str, in_channels: int, out_channels: int, num_layers: int, num_groups: int) -> list[ResnetBlock]:
    """Those of a stage: all of one size, the first one comes to the stage's channels."""
    return [
        ResnetBlock(f"{name}.resnets.{i}", out_channels if i else in_channels, out_channels, num_groups)
        for i in range(num_layers)
    ]


class DownStage:
    """Some resnet blocks of one size, then a convolution to half of it unless it is the last stage."""

    def __init__(self, resnets: list[ResnetBlock], step: Conv2d | None) -> None:
        self.resnets, self.step = resnets, step

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x, memory)
        if self.step is None:
            return x
        _, rows, columns, channels = x.shape
        out = self.step(x, out=memory.take((1, rows // 2, columns // 2, channels), x.dtype))
        memory.give(x)
        return out


class UpStage:
    """A convolution to twice the size unless it is the first stage, then some resnet blocks."""

    def __init__(self, resnets: list[ResnetBlock], step: UpsampleConv2d | None) -> None:
        self.resnets, self.step = resnets, step

    def __call__(self, x: Tensor, memory: FeatureMemory, band_rows: int | None) -> Tensor:
        """`band_rows`: the larger picture is never whole in memory, but in bands of so many rows."""
        if self.step is None:
            x = self.resnets[0](x, memory)
        elif band_rows is not None:
            x = self.resnets[0].upsampled(x, self.step, band_rows, memory)
        else:
            _, rows, columns, _ = x.shape
            large = self.step(x, out=memory.take((1, 2 * rows, 2 * columns, self.step.out_channels), x.dtype))
            memory.give(x)
            x = self.resnets[0](large, memory)
        for resnet in self.resnets[1:]:
            x = resnet(x, memory)
        return x
