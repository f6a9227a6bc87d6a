"""Estimates how long images take, from the durations of earlier runs on this machine, or from operation counts.

    times = PastTimes(folder, "Z-Image-Turbo float32 tp 1")
    times.note(params, timings)                        # after a run
    expected = times.expected(params, work, is_loaded) # None if nothing is known

Durations are kept in one small file of the cache folder, by model, CPU and threads.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.diffusion.params import GenerationParams, Limits, PipelineTimings
from tilewright.host import files

_log = logging.getLogger(__name__)

FILE = "picture_times.json"
MAX_RUNS = 32  # per model: the latest run of each kind of request
MAX_MODELS = 64
MAX_FILE_BYTES = 4 << 20  # twice the size for that many runs and models
# Share of the multiply peak that products and attention of a step reach together (docs/diffusion.md).
SHARE_OF_PEAK = 0.6


@dataclass(frozen=True)
class Expected:
    seconds: float
    basis: str  # source of the estimate, for people


@dataclass(frozen=True)
class Work:
    """Sizes that a step's operations depend on: 2 per parameter and token, 4 per pair of tokens, layer and channel.

    Texts are not counted: they are short beside an image.
    """

    num_parameters: int
    attention_channels: int  # width, summed over the layers
    size_multiple: int
    frame_multiple: int

    @classmethod
    def of(cls, num_parameters: int, config: Mapping[str, Any], limits: Limits) -> Work:
        """Return the work of a transformer from its config, by the names of any family."""
        layers = sum(int(config.get(name, 0)) for name in ("num_layers", "num_single_layers", "n_layers"))
        width = int(config.get("dim") or config["num_attention_heads"] * config["attention_head_dim"])
        return cls(num_parameters, layers * width, limits.size_multiple, limits.frame_multiple)

    def step(self, width: int, height: int, num_frames: int) -> float:
        """Return the operations of one unguided step of one image."""
        tokens = width * height / self.size_multiple**2 * (1 + (num_frames - 1) / self.frame_multiple)
        return 2.0 * self.num_parameters * tokens + 4.0 * self.attention_channels * tokens**2


@dataclass(frozen=True)
class Run:
    """Durations of one request."""

    width: int
    height: int
    num_frames: int
    n: int
    kind: str  # what else the duration depends on, except the number of steps
    load_s: float
    encode_s: float
    step_s: float
    decode_s: float

    def is_like(self, other: Run) -> bool:
        return _shape(self) == _shape(other) and self.kind == other.kind

    def total_s(self, num_steps: int, is_loaded: bool) -> float:
        return (0.0 if is_loaded else self.load_s) + self.encode_s + num_steps * self.step_s + self.decode_s


def kind_of(params: GenerationParams) -> str:
    """Return what else a step's duration depends on: guidance, its interval, and whether steps are skipped."""
    guidance = "unguided" if params.guidance == 0 else "guided" if params.guidance > 1 else "barely guided"
    begin, end = params.guidance_interval
    negative = "" if params.negative_prompt is None else ", negative prompt"
    decoded = ", not decoded" if params.output == "latents" else ""
    return f"{guidance} {begin:g} to {end:g}{negative}, step cache {params.step_cache:g}{decoded}"


class PastTimes:
    """Durations of one model's runs. With `folder` None they are kept only while the process runs."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self._path = None if folder is None else folder / FILE
        self._key = key
        self._runs = _parsed(self._read().get(key, []))  # the latest last

    def note(self, params: GenerationParams, timings: PipelineTimings) -> None:
        """Record the timings of a run. The first of several steps may wait for pages, and is left out."""
        steps_s = timings.steps_s[1:] or timings.steps_s
        if not steps_s:
            return
        numbers = timings.load_s, timings.encode_s, sum(steps_s) / len(steps_s), timings.decode_s
        run = Run(params.width, params.height, params.num_frames, params.n, kind_of(params), *numbers)
        before = next((one for one in self._runs if one.is_like(run)), None)
        if before is not None and run.load_s == 0:  # the networks were in memory: keep an earlier run's loading time
            run = Run(**{**asdict(run), "load_s": before.load_s})
        others = [one for one in self._runs if not one.is_like(run)]
        self._runs = [*others[1 - MAX_RUNS :], run]
        self._write()

    def expected(self, params: GenerationParams, work: Work, is_loaded: bool) -> Expected | None:
        """Return the duration of the last run of this size and kind, else the nearest size's, scaled by operations."""
        shape, kind = _shape(params), kind_of(params)
        for run in reversed(self._runs):
            if _shape(run) == shape and run.kind == kind:
                return Expected(run.total_s(params.num_steps, is_loaded), "as long as the last one of this size took")
        # Costs that do not depend on the size make small runs a bad measure of large ones.
        alike = [run for run in reversed(self._runs) if run.kind == kind]
        nearest = min(
            alike, key=lambda run: abs(math.log(_operations(run, work) / _operations(params, work))), default=None
        )
        return None if nearest is None else _scaled(nearest, params, work, is_loaded)

    def _read(self) -> dict[str, Any]:
        """Return the file's contents; empty if it is missing or unreadable, since it is only a cache."""
        try:
            found = {} if self._path is None else json.loads(files.read_bytes(self._path, MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self) -> None:
        if self._path is None:
            return
        kept = {key: runs for key, runs in self._read().items() if key != self._key}
        kept = dict(list(kept.items())[1 - MAX_MODELS :])
        kept[self._key] = [asdict(run) for run in self._runs]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=FILE, suffix=".partial")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(kept, file, indent=1)
                os.replace(temporary, self._path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.debug("times of images are not kept: %s", error)


def estimated(params: GenerationParams, work: Work, num_sides: int, operations_per_s: float) -> Expected:
    """Estimate without a known run, by the operations of all steps; `num_sides` is 2 if both prompts are one batch."""
    operations = params.n * params.num_steps * num_sides * work.step(params.width, params.height, params.num_frames)
    basis = f"estimated: {operations / 1e12:.2g} trillion operations of its steps; prompt and decoding come on top"
    return Expected(operations / (SHARE_OF_PEAK * operations_per_s), basis)


def sizes_in_time(
    params: GenerationParams, limits: Limits, allowed_s: float, seconds: Callable[[GenerationParams], float]
) -> list[tuple[int, int]]:
    """Return the largest size of the request's shape that takes at most `allowed_s`, and the largest square.

    `seconds` returns a request's duration; other settings are as in `params`. Empty if nothing is fast enough.
    """
    found: list[tuple[int, int]] = []
    for shape in ((params.width, params.height), (1, 1)):
        for width, height in limits.sizes_like(*shape):
            if seconds(replace(params, width=width, height=height)) <= allowed_s:
                found.append((width, height))
                break
    return list(dict.fromkeys(found))


def _scaled(run: Run, params: GenerationParams, work: Work, is_loaded: bool) -> Expected:
    steps = _operations(params, work) / _operations(run, work)
    pixels = math.prod(_shape(params)) / math.prod(_shape(run))
    like = Run(**{**asdict(run), "step_s": steps * run.step_s, "decode_s": pixels * run.decode_s})
    size = " x ".join(map(str, _shape(run)[: 2 if run.num_frames == 1 else 3]))
    return Expected(like.total_s(params.num_steps, is_loaded), f"scaled from what {size} took")


def _operations(one: Run | GenerationParams, work: Work) -> float:
    """Return the operations of an unguided step."""
    return one.n * work.step(one.width, one.height, one.num_frames)


def _shape(one: Run | GenerationParams) -> tuple[int, int, int, int]:
    return one.width, one.height, one.num_frames, one.n


def _parsed(stored: Any) -> list[Run]:
    """Return the runs of a file without malformed entries."""
    runs = []
    for one in stored if isinstance(stored, list) else []:
        try:
            run = Run(**one)
            if min(*_shape(run), run.step_s) > 0:
                runs.append(run)
        except TypeError:
            continue
    return runs
