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
    """A pipeline that generates images, one request at a time.

        with Diffusion("path/to/Z-Image-Turbo") as diffusion:
            diffusion.generate("a lighthouse at dusk", seed=7).images[0].save("lighthouse.png")

    `model` is a folder in diffusers' layout or a hub id; None: the small model of the package.

    dtype        "auto" (each component as it is stored), "bfloat16" or "float32"
    tp           ranks that the networks are split over, each a process with its own cores and memory
                 (docs/parallel.md)
    cpu_binding  the CPUs of each rank, such as "0-7|8-15"; None: those of one NUMA node each
    device       "cpu", or a GPU: "cuda", "cuda:1" (docs/devices.md)
    backend      "native": the kernels; "torch": the same ops in plain torch, to compare with (docs/devices.md); None:
                 the kernels on a CPU, torch on a GPU
    low_memory   text encoder, transformer and VAE are mapped and released in turn: at most the largest is in memory
    stream_layers  bytes, such as "4GB", that the layers of a network may take: the others are read from the pack cache
                 as they compute, in every step; None: all stay in memory
    pack_cache   whether packed weights and durations are cached on disk for the next start
    progress     whether loading shows a progress bar
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        tp: int = 1,
        cpu_binding: str | None = None,
        device: str = "cpu",
        backend: str | None = None,
        low_memory: bool = False,
        stream_layers: int | str | None = None,
        pack_cache: bool = True,
        progress: bool = False,
    ) -> None:
        self.platform = platform.resolve(device, backend, streams_layers=stream_layers is not None)
        self.platform.require_one_rank(tp)
        layer_bytes = None if stream_layers is None else parse_bytes(stream_layers)
        path = pipeline_folder(embedded.path("tiny_draw") if model is None else model)
        self.name = embedded.name_of(path if model is None else model)
        self._lock = threading.Lock()
        folder = config.current().cache_dir if pack_cache else None
        how = f"{dtype}, tp {tp}, {low_memory=}, {layer_bytes=}, {self.platform.backend}, {self.platform.device}"
        self._times = PastTimes(folder, f"{self.name}, {how}, {_machine()}")
        self._operations_per_s: float | None = None  # measured on first use
        options: dict[str, Any] = {"dtype": dtype, "low_memory": low_memory, "pack_cache": pack_cache}
        options["stream_layers"] = layer_bytes
        self._ranks = (
            None
            if check_size(tp) == 1
            else DiffusionRanks(tp, {"model": str(path), **options}, self.platform, cpu_binding)
        )
        try:
            with self._computing():
                group = None if self._ranks is None else self._ranks.group
                self.pipeline = open_pipeline(path, progress=progress, group=group, **options)
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
