"""Noise levels and the steps between them, as plain functions over a list of sigmas; classifier-free guidance.

A schedule is num_steps + 1 sigmas: latents are (1 - sigma) * picture + sigma * noise, from the first sigma, which is
(nearly) 1, to the last, which is 0. A solver makes of it a `Step`: a function that takes latents from one sigma to the
next by what the transformer predicts, the velocity noise - picture. Solvers of more than one step keep what they need
of the steps before in that function.
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

# Latents after step i, of the latents before it and the velocity there: step(i, latents, velocity).
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
        """Of each step, as transformers are told the noise level: sigma in thousandths."""
        return tuple(sigma * self.num_train_timesteps for sigma in self.sigmas[:-1])


def euler(schedule: Schedule) -> Step:
    """Along the velocity."""

    def step(index: int, latents: Tensor, velocity: Tensor) -> Tensor:
        sigma, next_sigma = schedule.sigmas[index : index + 2]
        return latents + (next_sigma - sigma) * velocity

    return step


def estimate(schedule: Schedule, index: int, latents: Tensor, velocity: Tensor) -> Tensor:
    """The picture as step `index` sees it: what latents would be if the velocity stayed as it is."""
    return latents - schedule.sigmas[index] * velocity


def linear_sigmas(num_steps: int) -> list[float]:
    """1 down to 1 / num_steps, evenly: where most flow models begin before they shift."""
    return np.linspace(1.0, 1.0 / num_steps, num_steps).tolist()


def shift_for(num_tokens: int, config: Mapping[str, Any]) -> float:
    """mu, the shift of a picture of so many tokens: a line through the two that a scheduler's config gives."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return base + (top - base) / (high - low) * (num_tokens - low)


def flow_match_schedule(
    config: Mapping[str, Any], num_steps: int, *, mu: float | None = None, sigmas: Sequence[float] | None = None
) -> Schedule:
    """The schedule of a FlowMatchEulerDiscreteScheduler config for `num_steps`.

    `sigmas` are those before shifting, for models that do not begin with the scheduler's own; `mu` is the shift by
    resolution, where the config says `use_dynamic_shifting`.
    """
    refuse(config, "stochastic_sampling", "invert_sigmas")
    train = int(config.get("num_train_timesteps", 1000))
    shift = float(config.get("shift", 1.0))
    if sigmas is None:
        ends = (1.0, 1.0 / train)
        if not config.get("use_dynamic_shifting"):  # the scheduler's own ends are shifted ones, and shifted again
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
    """UnsupportedConfig if the scheduler's config asks for one of them."""
    for name in names:
        if config.get(name):
            raise UnsupportedConfig(f"the scheduler's config has {name} {config[name]!r}, which is not built")


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _time_shifted(sigma: float, mu: float, kind: str) -> float:
    if kind not in ("exponential", "linear"):
        raise UnsupportedConfig(f"the scheduler's time_shift_type is {kind!r}, expected exponential or linear")
    factor = math.exp(mu) if kind == "exponential" else mu
    return factor / (factor + (1 / sigma - 1))


def _stretched(sigmas: Sequence[float], terminal: float) -> list[float]:
    """Moved away from 1 so far that the last is `terminal`; one alone at 1 stays where it is."""
    if sigmas[-1] == 1:
        return list(sigmas)
    scale = (1 - sigmas[-1]) / (1 - terminal)
    return [1 - (1 - sigma) / scale for sigma in sigmas]


def _respaced(sigmas: Sequence[float], config: Mapping[str, Any]) -> list[float]:
    """The sigmas between the same ends, spaced as the config says: as they are, or by Karras, exponentially or beta."""
    refuse(config, "use_beta_sigmas")
    first, last, count = sigmas[0], sigmas[-1], len(sigmas)
    if config.get("use_karras_sigmas"):
        rho = 7.0
        return (np.linspace(first ** (1 / rho), last ** (1 / rho), count) ** rho).tolist()
    if config.get("use_exponential_sigmas"):
        return np.exp(np.linspace(math.log(first), math.log(last), count)).tolist()
    return list(sigmas)


def guided(positive: Tensor, negative: Tensor, scale: float, max_norm: float = 0.0) -> Tensor:
    """positive + scale * (positive - negative), fp32 [n, ...].

    With `max_norm`, no picture's result is longer than so many times its positive: strong guidance burns colours.
    """
    result = positive + scale * (positive - negative)
    if max_norm:
        bound = max_norm * _norms(positive)
        result *= (bound / _norms(result).clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    return result


def _norms(x: Tensor) -> Tensor:
    """Of each picture, in the shape that multiplies it."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, *(1 for _ in x.shape[1:]))
