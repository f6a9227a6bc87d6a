"""The table of token embeddings, split over ranks by tokens; and the embedding of a diffusion timestep."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.ops.embedding import embedding
from tilewright.ops.linear import PackedWeight
from tilewright.weights.conv import Unpacked
from tilewright.weights.spec import Weight


class TokenEmbedding:
    """Look-up of token embeddings [T, D]. A rank gives zeros for tokens of other ranks; the sum of all is the row."""

    def __init__(self, name: str, num_tokens: int, width: int, head: GatheredLinear | None = None) -> None:
        """Read the tensor `name`, or share the head's weight, in the head's format."""
        own = partition.current()
        self.num_tokens = num_tokens if head is None else head.width
        shard = own.width("vocabulary", self.num_tokens)
        self.weight: Weight[PackedWeight] | Weight[Tensor]
        self.weight = Unpacked(f"{name}.weight", num_tokens, width, shard=shard) if head is None else head.weight
        self._first = own.group.rank * shard.length
        self._group = own.group if own.is_split else None

    def __call__(self, ids_T: Tensor) -> Tensor:
        if self._group is None:
            return embedding(ids_T, self.weight.value)
        return self._group.all_reduce(embedding(ids_T, self.weight.value, first=self._first, num_ids=self.num_tokens))


MAX_PERIOD = 10000.0


class TimestepEmbedding:
    """linear_2(silu(linear_1(waves of t))) in fp32: few rows, on which all others depend."""

    def __init__(self, name: str, num_waves: int, width: int, *, bias: bool = True) -> None:
        self.num_waves = num_waves
        inner = partition.current().width("timestep embedding", width)
        self.linear_1 = Linear([(f"{name}.linear_1", width, inner)], num_waves, bias=bias)
        self.linear_2 = Linear([(f"{name}.linear_2", width)], width, column_shard=inner, bias=bias)

    def __call__(self, timesteps: Tensor) -> Tensor:
        """Return the embeddings [n, width] of n timesteps, in thousandths of the whole way."""
        return self.linear_2(self.linear_1(waves(timesteps, self.num_waves), activation="silu"))


def waves(timesteps: Tensor, count: int) -> Tensor:
    """Return cos, then sin, of each timestep over periods from 2 pi to 2 pi * 10,000: fp32 [n, count]."""
    half = count // 2
    frequencies = torch.exp(-math.log(MAX_PERIOD) / half * torch.arange(half, device=timesteps.device))
    angles = timesteps.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)
