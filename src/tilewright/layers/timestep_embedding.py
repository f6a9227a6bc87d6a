"""What diffusion transformers know of the noise level: waves of the timestep, through two linears."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.linear import Linear

MAX_PERIOD = 10000.0


class TimestepEmbedding:
    """linear_2(silu(linear_1(waves of t))), in fp32: a few rows, which steer all others."""

    def __init__(self, name: str, num_waves: int, width: int, *, bias: bool = True) -> None:
        self.num_waves = num_waves
        inner = partition.current().width("timestep embedding", width)
        self.linear_1 = Linear([(f"{name}.linear_1", width, inner)], num_waves, bias=bias)
        self.linear_2 = Linear([(f"{name}.linear_2", width)], width, column_shard=inner, bias=bias)

    def __call__(self, timesteps: Tensor) -> Tensor:
        """[n, width] of n timesteps, in thousandths of the whole way."""
        return self.linear_2(self.linear_1(waves(timesteps, self.num_waves), activation="silu"))


def waves(timesteps: Tensor, count: int) -> Tensor:
    """cos, then sin, of each timestep over periods from 2 pi to 2 pi * 10,000: fp32 [n, count]."""
    half = count // 2
    frequencies = torch.exp(-math.log(MAX_PERIOD) / half * torch.arange(half, device=timesteps.device))
    angles = timesteps.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)
