"""Steps that remember earlier ones: UniPC and DPM-Solver++ (2M), as Wan's checkpoints ask for them.

A sample of noise level s is (1 - s) clean + s noise, and the network gives the velocity, noise - clean. Levels fall
over a list of sigmas, the last of which is 0. What a step needs of the ones before is its argument and its result:

    history = None
    for i in range(len(sigmas) - 1):
        sample, history = unipc_step(sigmas, i, network(sample), sample, history)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

UNIPC_ORDER = 2


@dataclass(frozen=True)
class Schedule:
    """The noise levels of a run, one more than it has steps, and what the network is told at each step."""

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]


def unipc_schedule(num_steps: int, shift: float, num_train_steps: int = 1000) -> Schedule:
    """Levels from 1 to 1 / num_train_steps and then 0, moved by `shift` towards 1, as UniPC takes them for flows."""
    levels = _shifted(np.linspace(1, 1 / num_train_steps, num_steps + 1)[:-1], shift)
    # The logarithm of the share of the picture is needed at the first level, where there is none of it.
    levels[0] = min(levels[0], 1 - 1e-6)
    return _schedule(levels, num_train_steps)


def dpm_schedule(num_steps: int, shift: float, num_train_steps: int = 1000) -> Schedule:
    """Levels from 1 - 1 / num_train_steps to 0, moved by `shift` towards 1, as DPM-Solver++ takes them for flows."""
    levels = 1 - np.linspace(1, 1 / num_train_steps, num_steps + 1)
    return _schedule(_shifted(levels[:0:-1], shift), num_train_steps)


def _shifted(levels: np.ndarray, shift: float) -> np.ndarray:
    return shift * levels / (1 + (shift - 1) * levels)


def _schedule(levels: np.ndarray, num_train_steps: int) -> Schedule:
    # Rounded to fp32 as in the runs these networks were tuned with: 1 - 1e-6 has 6 % more of the picture then. The
    # network was trained on whole timesteps, and those are cut off, not rounded.
    return Schedule(
        sigmas=(*(float(level) for level in levels.astype(np.float32)), 0.0),
        timesteps=tuple(float(int(level * num_train_steps)) for level in levels),
    )


@dataclass(frozen=True)
class UnipcHistory:
    """What a step leaves to the next one."""

    cleans: tuple[Tensor, ...]  # the clean samples that steps predicted, the latest last
    sample: Tensor  # where the last step began
    order: int  # of the last step


def unipc_step(
    sigmas: Sequence[float],
    step: int,
    velocity: Tensor,
    sample: Tensor,
    history: UnipcHistory | None,
    *,
    max_order: int = UNIPC_ORDER,
) -> tuple[Tensor, UnipcHistory]:
    """The sample at sigmas[step + 1], from the one at sigmas[step] and the velocity there.

    What the last step predicted is first corrected by what the network says now, with no evaluation more: UniC, then
    UniP, of the B(h) = e^h - 1 kind (arXiv 2302.04867).
    """
    clean = sample - sigmas[step] * velocity
    if history is not None:
        past = history.cleans[-history.order :]
        sample = _integrated(sigmas, step, history.sample, past, corrected_by=clean)
    order = min(max_order, len(sigmas) - 1 - step, step + 1)  # a lower one at both ends
    cleans = (*(history.cleans if history else ()), clean)[-max_order:]
    predicted = _integrated(sigmas, step + 1, sample, cleans[-order:])
    return predicted, UnipcHistory(cleans, sample, order)


def _integrated(
    sigmas: Sequence[float], end: int, sample: Tensor, cleans: Sequence[Tensor], corrected_by: Tensor | None = None
) -> Tensor:
    """The sample at level `end` from the one at the level before, given clean samples up to that level.

    They are interpolated by a polynomial in the log-SNR, which also meets `corrected_by` at `end` where that is given.
    """
    begin = end - 1
    h = _log_snr(sigmas[end]) - _log_snr(sigmas[begin])
    latest, order = cleans[-1], len(cleans)
    # Where the other known points are, with the step from begin to end as the unit: the earlier ones lie below 0.
    places = [(_log_snr(sigmas[begin - i]) - _log_snr(sigmas[begin])) / h for i in range(1, order)]
    differences = [(cleans[-1 - i] - latest) / place for i, place in enumerate(places, start=1)]
    if corrected_by is not None:
        places.append(1.0)
        differences.append(corrected_by - latest)
    factor = (1 - sigmas[end]) * math.expm1(-h)
    result = sigmas[end] / sigmas[begin] * sample - factor * latest
    for weight, difference in zip(_weights(places, h), differences, strict=True):
        result -= factor * weight * difference
    return result


def _weights(places: Sequence[float], h: float) -> Sequence[float]:
    """Of the divided differences at those places in a step of h."""
    if len(places) <= 1:
        return [0.5] * len(places)  # the value for a small h, with which the solver is as accurate at any
    moments, phi = [], math.expm1(-h) / -h - 1
    for i in range(1, len(places) + 1):
        moments.append(phi * math.factorial(i) / math.expm1(-h))
        phi = phi / -h - 1 / math.factorial(i + 1)
    powers = np.vander(places, increasing=True).T
    return [float(weight) for weight in np.linalg.solve(powers, moments)]


def dpm_step(
    sigmas: Sequence[float], step: int, velocity: Tensor, sample: Tensor, last_clean: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sample at sigmas[step + 1] by DPM-Solver++ (2M, midpoint), and the clean sample for the next step.

    The first step, and the last one to 0, are of the first order.
    """
    clean = sample - sigmas[step] * velocity
    h = _log_snr(sigmas[step + 1]) - _log_snr(sigmas[step])
    extrapolated = clean
    if last_clean is not None and sigmas[step + 1] > 0:
        ratio = (_log_snr(sigmas[step]) - _log_snr(sigmas[step - 1])) / h
        extrapolated = clean + (clean - last_clean) / (2 * ratio)
    result = sigmas[step + 1] / sigmas[step] * sample - (1 - sigmas[step + 1]) * math.expm1(-h) * extrapolated
    return result, clean


def _log_snr(sigma: float) -> float:
    """Of a sample: the logarithm of the share of the picture over that of the noise."""
    return math.log1p(-sigma) - math.log(sigma) if sigma > 0 else math.inf
