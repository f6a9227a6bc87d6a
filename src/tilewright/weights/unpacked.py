"""Weights that are kept as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.linear import PACK_BLOCK_BYTES
from tilewright.ops.memory import empty_in_huge_pages
from tilewright.weights.shard import Shard
from tilewright.weights.spec import Reader, Source, Weight


class Unpacked(Weight[Tensor]):
    """A tensor as it is: norms, position tables, an embedding table that is not tied.

    `in_fp32`: in fp32 whatever the model is in, for the few values that steer many. `shard` is what this rank has of
    the first axis.
    """

    def __init__(self, name: str, *shape: int, in_fp32: bool = False, shard: Shard | None = None) -> None:
        super().__init__([Source(name, shape, (shard,))])
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
    """A convolution over time of each channel for itself, [C, 1, W] in the checkpoint, as [W, C].

    `shard` are the channels that this rank has.
    """

    def __init__(self, name: str, channels: int, taps: int, shard: Shard | None = None) -> None:
        super().__init__([Source(f"{name}.weight", (channels, 1, taps), (shard,))])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        self._value = readers[0].read()[:, 0].t().to(backend.device(), dtype).contiguous()


class SnakeWaves(Weight[tuple[Tensor, Tensor]]):
    """a and 1 / b of each channel, fp32 whatever the model is in; the checkpoint has log a and log b."""

    EPS = 1e-9  # keeps b from 0

    def __init__(self, name: str, channels: int) -> None:
        super().__init__([Source(f"{name}.{part}", (channels,)) for part in ("alpha", "beta")])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        alpha, beta = (reader.read().to(backend.device(), torch.float32) for reader in readers)
        self._value = alpha.exp(), 1 / (beta.exp() + self.EPS)
