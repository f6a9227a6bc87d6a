"""`tilewright.Diffusion`: the Python API for images and videos."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright import config
from tilewright.diffusion.components import Components, pipeline_folder
from tilewright.diffusion.expected import Expected, PastTimes, Work, estimated
from tilewright.diffusion.options import DiffusionOptions
from tilewright.diffusion.params import GenerationParams, Limits, PipelineTimings
from tilewright.diffusion.pipeline import OnStep, PipelineResult, ignore_step
from tilewright.diffusion.pipelines import open_pipeline
from tilewright.diffusion.ranks import DiffusionRanks, check_size
from tilewright.host.memory import parse_bytes
from tilewright.host.topology import cpu_name, read_text
from tilewright.ops import backend as ops_backend
from tilewright.ops import platform
from tilewright.ops.native import kernels
from tilewright.ops.platform import Platform
from tilewright.options import check_names, described, signature
from tilewright.weights import embedded

_log = logging.getLogger(__name__)

PROBE_S = 0.2  # to measure this machine's multiply speed, if no run is known


@dataclass(frozen=True)
class Generated:
    """Images (or videos, each a list of frames), and the request they were made from."""

    images: list[Any]  # PIL images, lists of them for videos, or uint8 arrays [T, H, W, 3]; empty for latents
    latents: Tensor  # at the end of the run, in diffusers' layout
    timings: PipelineTimings
    params: GenerationParams
    model: str

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that reproduce the first image: the metadata of its file."""
        return self.settings_of(0)

    def settings_of(self, index: int) -> dict[str, Any]:
        return {"model": self.model, **self.params.settings(index)}


class Diffusion:
    __doc__ = f"""A pipeline that generates images, one request at a time.

        with Diffusion("path/to/Z-Image-Turbo") as diffusion:
            diffusion.generate("a lighthouse at dusk", seed=7).images[0].save("lighthouse.png")

    `model` is a folder in diffusers' layout or a hub id; None: the small model of the package. The options:

{described(DiffusionOptions)}
    """
    __signature__ = signature(DiffusionOptions, model=None)

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        check_names("Diffusion", options, DiffusionOptions)
        own = DiffusionOptions(**options)
        self.platform = platform.resolve(own.device, own.backend, streams_layers=own.stream_layers is not None)
        self.platform.require_one_rank(own.tp)
        layer_bytes = None if own.stream_layers is None else parse_bytes(own.stream_layers)
        path = pipeline_folder(embedded.path("tiny_draw") if model is None else model)
        self.name = embedded.name_of(path if model is None else model)
        self._lock = threading.Lock()
        folder = config.current().cache_dir if own.pack_cache else None
        how = f"{own.dtype}, tp {own.tp}, low_memory={own.low_memory}, {layer_bytes=}, "
        how += f"{self.platform.backend}, {self.platform.device}"
        self._times = PastTimes(folder, f"{self.name}, {how}, {_machine()}")
        self._operations_per_s: float | None = None  # measured on first use
        loading: dict[str, Any] = {name: getattr(own, name) for name in ("dtype", "low_memory", "pack_cache")}
        loading["stream_layers"] = layer_bytes
        self._ranks = (
            None
            if check_size(own.tp) == 1
            else DiffusionRanks(own.tp, {"model": str(path), **loading}, self.platform, own.cpu_binding)
        )
        try:
            with self._computing():
                group = None if self._ranks is None else self._ranks.group
                self.pipeline = open_pipeline(path, progress=own.progress, group=group, **loading)
                _warn_of_size(self.pipeline.components, self.platform)
        except BaseException:
            self._close_ranks()
            raise

    @property
    def limits(self) -> Limits:
        return self.pipeline.limits

    def params(self, prompt: str, **settings: Any) -> GenerationParams:
        """Return a validated request with this model's defaults."""
        return self.limits.params(prompt, **settings)

    def expected(self, params: GenerationParams) -> Expected:
        """Return how long a request will take, and the basis of that estimate (docs/diffusion.md)."""
        work = self._work
        known = self._times.expected(params, work, self.pipeline.components.is_loaded("transformer"))
        if known is not None:
            return known
        if self._operations_per_s is None:
            type = "fp32" if self.pipeline.components.dtype("transformer") == torch.float32 else "bf16"
            self._operations_per_s = max(kernels.multiply_peak(type, kernels.num_threads(), PROBE_S))
        return estimated(params, work, 1 + self.pipeline.is_guided(params), self._operations_per_s)

    @functools.cached_property
    def _work(self) -> Work:
        return self.pipeline.work()

    def generate(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: Any = None,
        width: int | None = None,
        height: int | None = None,
        num_frames: int | None = None,
        num_steps: int | None = None,
        guidance: float | None = None,
        seed: int | None = None,
        latents: Any = None,
        n: int = 1,
        output: str = "pil",
        step_cache: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        guidance_norm: float | None = None,
        on_step: OnStep | None = None,
    ) -> Generated:
        """Generate the images of a prompt."""
        params = self.params(
            prompt,
            negative_prompt=negative_prompt,
            image=image,
            width=width,
            height=height,
            num_frames=num_frames,
            num_steps=num_steps,
            guidance=guidance,
            seed=seed,
            latents=latents,
            n=n,
            output=output,
            step_cache=step_cache,
            guidance_interval=guidance_interval,
            guidance_norm=guidance_norm,
        )
        return self.run(params, on_step)

    def run(self, params: GenerationParams, on_step: OnStep | None = None) -> Generated:
        """Generate the images of a request from `params`."""
        on_step = on_step or ignore_step
        with self._lock, self._computing():
            if self._ranks is None:
                result = self.pipeline.generate(params, on_step)
            else:
                with self._ranks.running(params, on_step) as decide:
                    result = self.pipeline.generate(params, decide)
        self._times.note(params, result.timings)
        return Generated(_images(result, params), result.latents, result.timings, params, self.name)

    def preview(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        """Return small images of a step, uint8 [n, T, H, W, 3], from the latents that on_step gets."""
        return self.pipeline.preview(latents, params)

    def _computing(self) -> contextlib.AbstractContextManager[None]:
        """Use the platform's ops on this thread within the context."""
        return ops_backend.use(self.platform.backend, self.platform.place)

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def close(self) -> None:
        self._close_ranks()
        self.pipeline.components.close()

    def __enter__(self) -> Diffusion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _machine() -> str:
    """Return what durations depend on: CPU, ISA level and number of threads."""
    return f"{cpu_name(read_text(Path('/proc/cpuinfo')))}, {kernels.active_isa()}, {kernels.num_threads()} threads"


def _warn_of_size(components: Components, platform: Platform) -> None:
    """Warn if the networks do not fit into memory together, but would one at a time with low memory."""
    needed, free = components.stored_bytes(), platform.available_bytes()
    if needed > free and not components.low_memory:
        _log.warning(
            "%s has networks of %.1f GB, and %.1f GB are free: low_memory=True (--low-memory) holds one at a time",
            components.folder,
            needed / 1e9,
            free / 1e9,
        )


def _images(result: PipelineResult, params: GenerationParams) -> list[Any]:
    if result.pixels is None:
        return []
    if params.output == "array":
        return list(result.pixels)
    from PIL import Image

    videos = [[Image.fromarray(np.ascontiguousarray(frame)) for frame in image] for image in result.pixels]
    return [frames[0] if params.num_frames == 1 else frames for frames in videos]
