"""Multistep solvers, used by Wan's checkpoints: UniPC and DPM-Solver++ (2M).

A step's history is an argument and a result (`unipc_step`, `dpm_step`); `unipc` and `dpm` wrap them as the steps of
`schedule`. At a level sigma a sample is (1 - sigma) * clean + sigma * noise, and the network predicts the velocity,
noise - clean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tilewright.diffusion.schedule import Schedule, Step, euler, flow_match_schedule, refuse
from tilewright.types import UnsupportedConfig

UNIPC_ORDER = 2
# Required config entries of both solvers, with the defaults of diffusers' class.
_FLOW = {"prediction_type": ("flow_prediction", "epsilon"), "use_flow_sigmas": (True, False)}
_UNIPC = {**_FLOW, "solver_type": ("bh2", "bh2"), "predict_x0": (True, True), "final_sigmas_type": ("zero", "zero")}
_DPM = {
    **_FLOW,
    "solver_type": ("midpoint", "midpoint"),
    "algorithm_type": ("dpmsolver++", "dpmsolver++"),
    "final_sigmas_type": ("zero", "zero"),
    "solver_order": (2, 2),
}
_NOT_BUILT = (
    "thresholding",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_lu_lambdas",
    "use_dynamic_shifting",
    "shift_terminal",
    "solver_p",
    "disable_corrector",
    "euler_at_final",
)


def solver_of(config: Mapping[str, Any], num_steps: int) -> tuple[Schedule, Step]:
    """Return the levels and steps of a scheduler's config: UniPC, DPM-Solver++ or Euler steps."""
    name = config.get("_class_name")
    shift, train = float(config.get("flow_shift", 1.0)), int(config.get("num_train_timesteps", 1000))
    if name == "UniPCMultistepScheduler":
        _check(config, _UNIPC)
        schedule = unipc_schedule(num_steps, shift, train)
        return schedule, unipc(schedule, _unipc_order(config))
    if name == "DPMSolverMultistepScheduler":
        _check(config, _DPM)
        schedule = dpm_schedule(num_steps, shift, train)
        return schedule, dpm(schedule)
    if name == "FlowMatchEulerDiscreteScheduler":
        plain = flow_match_schedule(config, num_steps)
        return plain, euler(plain)
    raise UnsupportedConfig(
        f"the scheduler is a {name}, expected a UniPCMultistepScheduler, DPMSolverMultistepScheduler or "
        "FlowMatchEulerDiscreteScheduler"
    )


def _check(config: Mapping[str, Any], built: Mapping[str, tuple[object, object]]) -> None:
    refuse(config, *_NOT_BUILT)
    for key, (expected, default) in built.items():
        if (value := config.get(key, default)) != expected:
            raise UnsupportedConfig(f"the scheduler's config has {key} {value!r}, expected {expected!r}")
    if not config.get("lower_order_final", True):
        raise UnsupportedConfig("the scheduler's config has lower_order_final false, expected true: the end is at 0")


def _unipc_order(config: Mapping[str, Any]) -> int:
    if (order := config.get("solver_order", UNIPC_ORDER)) not in (1, 2, 3):
        raise UnsupportedConfig(f"the scheduler's config has solver_order {order!r}, expected 1, 2 or 3")
    return order


@dataclass(frozen=True)
class WholeSchedule(Schedule):
    """Levels whose timesteps are integer thousandths, as in training: truncated, not rounded."""

    whole_timesteps: tuple[float, ...] = ()

    @property
    def timesteps(self) -> tuple[float, ...]:
        return self.whole_timesteps


def unipc_schedule(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Return levels from 1 to 1 / num_train_timesteps, and 0, shifted towards 1 by `shift`, as UniPC uses for flows."""
    levels = _shifted(np.linspace(1, 1 / num_train_timesteps, num_steps + 1)[:-1], shift)
    # The log-SNR is needed at the first level too, where there is no image yet.
    levels[0] = min(levels[0], 1 - 1e-6)
    return _schedule(levels, num_train_timesteps)


def dpm_schedule(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Return levels from 1 - 1 / num_train_timesteps to 0, shifted towards 1 by `shift`, as for DPM-Solver++."""
    levels = 1 - np.linspace(1, 1 / num_train_timesteps, num_steps + 1)
    return _schedule(_shifted(levels[:0:-1], shift), num_train_timesteps)


def _shifted(levels: np.ndarray, shift: float) -> np.ndarray:
    return shift * levels / (1 + (shift - 1) * levels)


def _schedule(levels: np.ndarray, num_train_timesteps: int) -> Schedule:
    # Rounded to fp32 as in the runs these networks were tuned with: 1 - 1e-6 then leaves 1 % more of the image.
    sigmas = (*(float(level) for level in levels.astype(np.float32)), 0.0)
    timesteps = tuple(float(int(level * num_train_timesteps)) for level in levels)
    return WholeSchedule(sigmas, num_train_timesteps, timesteps)


def unipc(schedule: Schedule, max_order: int = UNIPC_ORDER) -> Step:
    history: UnipcHistory | None = None

    def step(index: int, latents: Tensor, velocity: Tensor) -> Tensor:
        nonlocal history
        latents, history = unipc_step(schedule.sigmas, index, velocity, latents, history, max_order=max_order)
        return latents

    return step


def dpm(schedule: Schedule) -> Step:
    last_clean: Tensor | None = None

    def step(index: int, latents: Tensor, velocity: Tensor) -> Tensor:
        nonlocal last_clean
        latents, last_clean = dpm_step(schedule.sigmas, index, velocity, latents, last_clean)
        return latents

    return step


@dataclass(frozen=True)
class UnipcHistory:
    """State that a step passes to the next one."""

    cleans: tuple[Tensor, ...]  # the clean samples that earlier steps predicted, the latest last
    sample: Tensor  # at the start of the last step
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
    """Return the sample at sigmas[step + 1], from the one at sigmas[step] and the velocity there.

    The last step's result is first corrected by the new prediction, without another evaluation: UniC, then UniP, with
    B(h) = e^h - 1 (arXiv 2302.04867).
    """
    clean = sample - sigmas[step] * velocity
    if history is not None:
        past = history.cleans[-history.order :]
        sample = _integrated(sigmas, step, history.sample, past, corrected_by=clean)
    order = min(max_order, len(sigmas) - 1 - step, step + 1)  # lower at both ends
    cleans = (*(history.cleans if history else ()), clean)[-max_order:]
    predicted = _integrated(sigmas, step + 1, sample, cleans[-order:])
    return predicted, UnipcHistory(cleans, sample, order)


def _integrated(
    sigmas: Sequence[float], end: int, sample: Tensor, cleans: Sequence[Tensor], corrected_by: Tensor | None = None
) -> Tensor:
    """Return the sample at level `end` from the one at the level before, given clean samples up to that level.

    They are interpolated by a polynomial in the log-SNR, which also meets `corrected_by` at `end` if that is given.
    """
    begin = end - 1
    h = _log_snr(sigmas[end]) - _log_snr(sigmas[begin])
    latest, order = cleans[-1], len(cleans)
    # Positions of the other known points in units of the step from begin to end: earlier ones are below 0.
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
    """Return the weights of the divided differences at those places in a step of h."""
    if len(places) <= 1:
        return [0.5] * len(places)  # the limit for small h, equally accurate for any
    moments, phi = [], math.expm1(-h) / -h - 1
    for i in range(1, len(places) + 1):
        moments.append(phi * math.factorial(i) / math.expm1(-h))
        phi = phi / -h - 1 / math.factorial(i + 1)
    powers = np.vander(places, increasing=True).T
    return [float(weight) for weight in np.linalg.solve(powers, moments)]


def dpm_step(
    sigmas: Sequence[float], step: int, velocity: Tensor, sample: Tensor, last_clean: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sample at sigmas[step + 1] by DPM-Solver++ (2M, midpoint), and the clean sample for the next step.

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
    """Return the logarithm of the image's share of a sample over the noise's."""
    return math.log1p(-sigma) - math.log(sigma) if sigma > 0 else math.inf
