"""The blocks of AutoencoderKL: pictures [B, H, W, C], normed over all pixels of a picture."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.layers.conv import Conv2d
from tilewright.layers.feature_memory import FeatureMemory
from tilewright.layers.group_norm import GroupNorm
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
        if self.shortcut is None:
            out, normed = x, self.norm1(x, out=memory.like(x))
        else:
            out, normed = self.shortcut(x, out=memory.take(shape, x.dtype)), self.norm1(x, out=x)
        inner = self.conv1(normed, out=memory.take(shape, x.dtype))
        memory.give(normed)
        self.conv2(self.norm2(inner, out=inner), residual=out, out=out)
        memory.give(inner)
        return out


class AttentionBlock:
    """x + attention over all pixels of a picture, with one head as wide as the channels."""

    def __init__(self, name: str, channels: int, num_groups: int) -> None:
        self.norm = GroupNorm(f"{name}.group_norm", channels, num_groups, EPS)
        self.qkv = Linear([(f"{name}.to_{part}", channels) for part in "qkv"], channels, bias=True)
        self.output = Linear([(f"{name}.to_out.0", channels)], channels, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        pictures, rows, columns, channels = x.shape
        x_ND = x.view(-1, channels)
        q, k, v = self.qkv(self.norm(x).view(-1, channels)).view(-1, 3, channels).split(1, dim=1)
        attended = varlen_attention(q, k, v, starts_of(pictures, rows * columns, x.device))
        self.output(attended.view(-1, channels), residual=x_ND, out=x_ND)
        return x


def starts_of(count: int, length: int, device: torch.device) -> Tensor:
    """Where each of `count` sequences of one length begins, and the end: int32 [count + 1]."""
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)


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


class Stage:
    """Some resnet blocks of one size, then a convolution to the next size unless it is the last stage."""

    def __init__(
        self, name: str, in_channels: int, out_channels: int, num_layers: int, num_groups: int, resample: Conv2d | None
    ) -> None:
        self.resnets = [
            ResnetBlock(f"{name}.resnets.{i}", out_channels if i else in_channels, out_channels, num_groups)
            for i in range(num_layers)
        ]
        self.resample = resample

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x, memory)
        if self.resample is None:
            return x
        pictures, rows, columns, _ = x.shape
        if self.resample.upsample:
            size = (2 * rows, 2 * columns)
        else:
            size = (rows // 2, columns // 2)
        out = self.resample(x, out=memory.take((pictures, *size, self.resample.out_channels), x.dtype))
        memory.give(x)
        return out
