"""Steps that remember earlier ones, as Wan's checkpoints ask for them: UniPC and DPM-Solver++ (2M).

What a step needs of the ones before is its argument and its result (`unipc_step`, `dpm_step`); `unipc` and `dpm` make
of them steps as `schedule` has them. At a level sigma a sample is (1 - sigma) * clean + sigma * noise, and the network
gives the velocity, noise - clean.
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
# What the configs of both solvers must say, with the default of diffusers' class where they say nothing.
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
    """The levels and steps that a scheduler's config asks for: UniPC, DPM-Solver++ or Euler steps."""
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
    """Levels of which the network is told in whole thousandths, as it was trained: cut off, not rounded."""

    whole_timesteps: tuple[float, ...] = ()

    @property
    def timesteps(self) -> tuple[float, ...]:
        return self.whole_timesteps


def unipc_schedule(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Levels from 1 to 1 / num_train_timesteps, and 0, moved by `shift` towards 1, as UniPC takes them for flows."""
    levels = _shifted(np.linspace(1, 1 / num_train_timesteps, num_steps + 1)[:-1], shift)
    # The logarithm of the share of the picture is needed at the first level, where there is none of it.
    levels[0] = min(levels[0], 1 - 1e-6)
    return _schedule(levels, num_train_timesteps)


def dpm_schedule(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Levels from 1 - 1 / num_train_timesteps to 0, moved by `shift` towards 1, as DPM-Solver++ takes them."""
    levels = 1 - np.linspace(1, 1 / num_train_timesteps, num_steps + 1)
    return _schedule(_shifted(levels[:0:-1], shift), num_train_timesteps)


def _shifted(levels: np.ndarray, shift: float) -> np.ndarray:
    return shift * levels / (1 + (shift - 1) * levels)


def _schedule(levels: np.ndarray, num_train_timesteps: int) -> Schedule:
    # Rounded to fp32 as in the runs that these networks were tuned with: 1 - 1e-6 leaves 1 % more of the picture then.
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
