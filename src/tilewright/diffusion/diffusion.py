"""`tilewright.Diffusion`: pictures and video from Python."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from tilewright import embedded
from tilewright.diffusion.components import Components
from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.diffusion.pipeline import OnStep, Result, Timings, ignore_step
from tilewright.diffusion.registry import open_pipeline


@dataclass(frozen=True)
class Generated:
    """Pictures (or videos, each a list of frames), and what made them."""

    images: list[Any]  # PIL pictures, lists of them for videos, or uint8 arrays [T, H, W, 3]; empty for latents
    latents: Tensor  # at the end, in diffusers' layout
    timings: Timings
    params: GenerationParams
    model: str

    @property
    def settings(self) -> dict[str, Any]:
        """What it takes to make the first picture again: the metadata of its file."""
        return self.settings_of(0)

    def settings_of(self, index: int) -> dict[str, Any]:
        return {"model": self.model, **self.params.settings(index)}


class Diffusion:
    """A pipeline, ready to make pictures, one request at a time.

        with Diffusion("path/to/Z-Image-Turbo") as diffusion:
            diffusion.generate("a lighthouse at dusk", seed=7).images[0].save("lighthouse.png")

    `model` is a folder in diffusers' layout or a hub id; None: the small one that comes with the package.

    dtype        "auto" (each component as it is stored), "bfloat16" or "float32"
    low_memory   text encoder, transformer and VAE are mapped and released in turn: the largest is what it takes
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        tp: int = 1,
        device: str = "cpu",
        backend: str = "native",
        low_memory: bool = False,
        pack_cache: bool = True,
        progress: bool = False,
    ) -> None:
        path = embedded.path("tiny_draw") if model is None else model
        self.name = embedded.name_of(path)
        components = Components(path, dtype=dtype, low_memory=low_memory, pack_cache=pack_cache, progress=progress)
        self.pipeline = open_pipeline(components)
        self._lock = threading.Lock()

    @property
    def limits(self) -> Limits:
        return self.pipeline.limits

    def params(self, prompt: str, **settings: Any) -> GenerationParams:
        """A request, checked, with this model's defaults."""
        return self.limits.params(prompt, **settings)

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
        """The pictures of a prompt."""
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
        """The pictures of a request that `params` made."""
        with self._lock:
            result = self.pipeline.generate(params, on_step or ignore_step)
        return Generated(_images(result, params), result.latents, result.timings, params, self.name)

    def preview(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        """The pictures that a step sees, small, uint8 [n, T, H, W, 3]: for an on_step, with the latents it gets."""
        return self.pipeline.preview(latents, params)

    def close(self) -> None:
        self.pipeline.components.release()

    def __enter__(self) -> Diffusion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _images(result: Result, params: GenerationParams) -> list[Any]:
    if result.pixels is None:
        return []
    if params.output == "array":
        return list(result.pixels)
    from PIL import Image

    videos = [[Image.fromarray(np.ascontiguousarray(frame)) for frame in picture] for picture in result.pixels]
    return [frames[0] if params.num_frames == 1 else frames for frames in videos]
