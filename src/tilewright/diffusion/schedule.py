"""Noise levels and the steps between them, as plain functions over a list of sigmas; classifier-free guidance.

A schedule is num_steps + 1 sigmas: latents are (1 - sigma) * image + sigma * noise, from the first sigma, (nearly) 1,
to the last, 0. A solver turns it into a `Step`: a function that moves latents from one sigma to the next by the
transformer's prediction, the velocity noise - image. A multistep solver keeps its history in that function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.types import UnsupportedConfig

# Returns the latents after step i from the latents before it and the velocity there: step(i, latents, velocity).
Step = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Schedule:
    """The sigmas of a run: one before each step, and the last, 0."""

    sigmas: tuple[float, ...]
    num_train_timesteps: int = 1000

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def timesteps(self) -> tuple[float, ...]:
        """Noise level of each step as the transformer's input: sigma in thousandths."""
        return tuple(sigma * self.num_train_timesteps for sigma in self.sigmas[:-1])


def euler(schedule: Schedule) -> Step:
    """Return Euler steps along the velocity."""

    def step(index: int, latents: Tensor, velocity: Tensor) -> Tensor:
        sigma, next_sigma = schedule.sigmas[index : index + 2]
        return latents + (next_sigma - sigma) * velocity

    return step


def estimate(schedule: Schedule, index: int, latents: Tensor, velocity: Tensor) -> Tensor:
    """Return the image that step `index` predicts: the latents at sigma 0 if the velocity stayed constant."""
    return latents - schedule.sigmas[index] * velocity


def linear_sigmas(num_steps: int) -> list[float]:
    """Return evenly spaced sigmas from 1 down to 1 / num_steps, which most flow models shift."""
    return np.linspace(1.0, 1.0 / num_steps, num_steps).tolist()


def shift_for(num_tokens: int, config: Mapping[str, Any]) -> float:
    """Return mu, the shift of an image of `num_tokens`: a line through the two points of a scheduler's config."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return base + (top - base) / (high - low) * (num_tokens - low)


def flow_match_schedule(
    config: Mapping[str, Any], num_steps: int, *, mu: float | None = None, sigmas: Sequence[float] | None = None
) -> Schedule:
    """Return the schedule of a FlowMatchEulerDiscreteScheduler config for `num_steps`.

    `sigmas` are those before shifting, for models with other ones than the scheduler's; `mu` is the shift by
    resolution, if the config has `use_dynamic_shifting`.
    """
    refuse(config, "stochastic_sampling", "invert_sigmas")
    train = int(config.get("num_train_timesteps", 1000))
    shift = float(config.get("shift", 1.0))
    if sigmas is None:
        ends = (1.0, 1.0 / train)
        if not config.get("use_dynamic_shifting"):  # the scheduler's own ends are already shifted, and shifted again
            ends = (_shifted(ends[0], shift), _shifted(ends[1], shift))
        sigmas = np.linspace(*ends, num_steps).tolist()
    if config.get("use_dynamic_shifting"):
        if mu is None:
            raise ValueError("the scheduler shifts by resolution: mu is missing")
        found = [_time_shifted(sigma, mu, str(config.get("time_shift_type", "exponential"))) for sigma in sigmas]
    else:
        found = [_shifted(sigma, shift) for sigma in sigmas]
    if terminal := config.get("shift_terminal"):
        found = _stretched(found, float(terminal))
    return Schedule((*_respaced(found, config), 0.0), train)


def refuse(config: Mapping[str, Any], *names: str) -> None:
    """Raise UnsupportedConfig if the scheduler's config enables one of the options."""
    for name in names:
        if config.get(name):
            raise UnsupportedConfig(f"the scheduler's config has {name} {config[name]!r}, which is not supported")


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _time_shifted(sigma: float, mu: float, kind: str) -> float:
    if kind not in ("exponential", "linear"):
        raise UnsupportedConfig(f"the scheduler's time_shift_type is {kind!r}, expected exponential or linear")
    factor = math.exp(mu) if kind == "exponential" else mu
    return factor / (factor + (1 / sigma - 1))


def _stretched(sigmas: Sequence[float], terminal: float) -> list[float]:
    """Stretch the distances from 1 so that the last sigma is `terminal`; a single sigma of 1 is unchanged."""
    if sigmas[-1] == 1:
        return list(sigmas)
    scale = (1 - sigmas[-1]) / (1 - terminal)
    return [1 - (1 - sigma) / scale for sigma in sigmas]


def _respaced(sigmas: Sequence[float], config: Mapping[str, Any]) -> list[float]:
    """Return the sigmas spaced as the config says between the same ends: unchanged, Karras, or exponential."""
    refuse(config, "use_beta_sigmas")
    first, last, count = sigmas[0], sigmas[-1], len(sigmas)
    if config.get("use_karras_sigmas"):
        rho = 7.0
        return (np.linspace(first ** (1 / rho), last ** (1 / rho), count) ** rho).tolist()
    if config.get("use_exponential_sigmas"):
        return np.exp(np.linspace(math.log(first), math.log(last), count)).tolist()
    return list(sigmas)


def guided(positive: Tensor, negative: Tensor, scale: float, max_norm: float = 0.0) -> Tensor:
    """Return positive + scale * (positive - negative), fp32 [n, ...].

    With `max_norm`, an image's result is at most that many times as long as its positive: strong guidance
    oversaturates colours.
    """
    result = positive + scale * (positive - negative)
    if max_norm:
        bound = max_norm * _norms(positive)
        result *= (bound / _norms(result).clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    return result


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each image, in a shape that broadcasts over it."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, *(1 for _ in x.shape[1:]))
