"""The base of all pipelines, the loop over steps, images to edit, and the result of a run.

    params = pipeline.limits.params("a red circle", seed=7)
    result = pipeline.generate(params, on_step=lambda step, num_steps, latents: ...)

A pipeline has four stages: `encode_prompt`, `init_latents`, `denoise`, `decode`. Latents are fp32 [n, t, h, w, C],
channels last, t = 1 for stills; a user's own are in diffusers' layout and are converted in `init_latents`.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tilewright.diffusion.components import Builders, Components
from tilewright.diffusion.expected import Work
from tilewright.diffusion.params import GenerationParams, Limits, PipelineTimings
from tilewright.diffusion.schedule import Schedule, Step, estimate
from tilewright.ops import backend
from tilewright.ops.plan import Arena
from tilewright.types import RequestError
from tilewright.weights.safetensors import SafetensorsCheckpoint

MIN_SIDE = 64
MAX_RATIO = 8  # of the longer side to the shorter


def rgb_images(given: Any, most: int) -> list[Image.Image]:
    """Return the validated images of a request as RGB; none for None."""
    found = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    if len(found) > most:
        raise RequestError(f"image is a list of {len(found)}, expected at most {most}", param="image")
    for image in found:
        if not isinstance(image, Image.Image):
            raise RequestError(f"image is a {type(image).__name__}, expected a PIL image", param="image")
        size = f"image is {image.width} x {image.height}"
        if min(image.size) < MIN_SIDE:
            raise RequestError(f"{size}, expected sides of at least {MIN_SIDE} pixels", param="image")
        if max(image.size) > MAX_RATIO * min(image.size):
            raise RequestError(f"{size}, expected sides of at most {MAX_RATIO} to 1", param="image")
    return [image.convert("RGB") for image in found]


def fitted(image: Image.Image, max_pixels: int, multiple: int) -> Tensor:
    """Return the image reduced to max_pixels and cropped to multiples of `multiple`: [1, 1, H, W, 3]."""
    if image.width * image.height > max_pixels:
        scale = math.sqrt(max_pixels / (image.width * image.height))
        size = int(image.width * scale), int(image.height * scale)
        image = image.resize(size, Image.Resampling.LANCZOS)
    width, height = (side // multiple * multiple for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return as_tensor(image.crop((left, top, left + width, top + height)))


def as_tensor(image: Image.Image) -> Tensor:
    """Return the image as fp32 [1, 1, H, W, 3] in [-1, 1], on the compute device."""
    return (torch.from_numpy(np.array(image))[None, None].float() / 127.5 - 1).to(backend.device())


PREVIEW_PIXELS = 256  # approximate longer side of a preview

# on_step(step, num_steps, latents): called after each step, counted from 1. The latents are the image that the step
# predicts, without the remaining noise: what a preview shows. It may raise Cancelled.
OnStep = Callable[[int, int, Tensor], object]


def ignore_step(step: int, num_steps: int, latents: Tensor) -> None:
    """Do nothing, as an on_step."""


@dataclass(frozen=True)
class PipelineResult:
    """Result of a run: the final latents, and the images unless only latents were asked for.

    Of several ranks only the first decodes images: autoencoders are not split, and the others would make the same.
    """

    latents: Tensor  # in diffusers' layout
    pixels: np.ndarray | None  # uint8 [n, T, H, W, 3]
    timings: PipelineTimings


class Pipeline(ABC):
    """A kind of checkpoint. Subclasses define the builders of its components (`BUILDERS`) and the stages."""

    BUILDERS: ClassVar[Builders] = {}

    limits: Limits
    timings: PipelineTimings  # of the current or last run

    def __init__(self, components: Components) -> None:
        self.components = components

    @abstractmethod
    def encode_prompt(self, params: GenerationParams) -> Any:
        """Return the transformer's inputs from the prompts: a frozen dataclass of the pipeline's own."""

    def is_guided(self, params: GenerationParams) -> bool:
        """Return whether the transformer reads a second prompt, which doubles a step's operations."""
        return params.guidance > 1

    def work(self) -> Work:
        """Return the sizes that a step's operations depend on."""
        shapes = SafetensorsCheckpoint(self.components.path("transformer")).shapes.values()
        num_parameters = sum(math.prod(shape) for shape in shapes)
        return Work.of(num_parameters, self.components.config("transformer"), self.limits)

    @abstractmethod
    def init_latents(self, params: GenerationParams) -> Tensor:
        """Return the latents before the first step, fp32."""

    @abstractmethod
    def denoise(self, latents: Tensor, conditioning: Any, params: GenerationParams, on_step: OnStep) -> Tensor:
        """Return the latents after the last step."""

    @abstractmethod
    def decode(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        """Return pixels, uint8 [n, T, H, W, 3]."""

    @abstractmethod
    def exported(self, latents: Tensor) -> Tensor:
        """Return latents in diffusers' layout, as `latents=` accepts them."""

    def preview(self, latents: Tensor, params: GenerationParams) -> np.ndarray:
        """Return small images of a step, uint8 [n, T, H, W, 3], decoded from averaged squares of latents."""
        side = max(params.width, params.height)
        factor = min(max(round(side / PREVIEW_PIXELS), 1), *latents.shape[2:4])
        n, t, height, width, channels = latents.shape
        rows, columns = height // factor, width // factor
        squares = latents[:, :, : rows * factor, : columns * factor].view(n, t, rows, factor, columns, factor, channels)
        with torch.inference_mode():
            return self.decode(squares.mean(dim=(3, 5)), params)

    def generate(self, params: GenerationParams, on_step: OnStep = ignore_step) -> PipelineResult:
        """Run all stages in turn."""
        self.timings = timings = PipelineTimings()
        with torch.inference_mode():
            with self._timed(timings, "encode_s"):
                conditioning = self.encode_prompt(params)
            with self._timed(timings, "denoise_s"):
                latents = self.init_latents(params)
                latents = self.denoise(latents, conditioning, params, _StepTimer(self.components, timings, on_step))
            pixels = None
            if params.output != "latents" and self.components.group.rank == 0:
                with self._timed(timings, "decode_s"):
                    pixels = self.decode(latents, params)
            return PipelineResult(backend.place().fetch(self.exported(latents)), pixels, timings)

    @contextlib.contextmanager
    def _timed(self, timings: PipelineTimings, name: str) -> Iterator[None]:
        """Set the timing of that name to the time within the context, and add its loading time to `load_s`."""
        begin_s, loaded_s = time.perf_counter(), self.components.loading_s
        yield
        load_s = self.components.loading_s - loaded_s
        setattr(timings, name, time.perf_counter() - begin_s - load_s)
        timings.load_s += load_s


class _StepTimer:
    """An on_step that records each step's duration, without loading and the time of `on_step` itself."""

    def __init__(self, components: Components, timings: PipelineTimings, on_step: OnStep) -> None:
        self._components, self._timings, self._on_step = components, timings, on_step
        self._begin_s = time.perf_counter() - components.loading_s

    def __call__(self, step: int, num_steps: int, latents: Tensor) -> None:
        self._timings.steps_s.append(time.perf_counter() - self._components.loading_s - self._begin_s)
        self._on_step(step, num_steps, latents)
        self._begin_s = time.perf_counter() - self._components.loading_s


def denoise_loop(
    latents: Tensor, schedule: Schedule, step: Step, predict: Callable[[int, Tensor], Tensor], on_step: OnStep
) -> Tensor:
    """Return the latents after the last step. `predict(index, latents)` is the velocity at step `index`, fp32.

    Results of ops within `predict` lie in memory that the steps share, since fresh memory costs a page fault per page:
    what must outlive a step is computed before the loop.
    """
    arena = Arena()
    for index in range(schedule.num_steps):
        with arena.use():
            velocity = predict(index, latents).clone()
        seen = estimate(schedule, index, latents, velocity)
        latents = step(index, latents, velocity)
        on_step(index + 1, schedule.num_steps, seen)
    return latents


def noise(shape: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Return normal noise fp32 [len(seeds), *shape], one generator per image, in diffusers' order for one seed.

    It is drawn on the host, whatever device computes: a seed gives the same image everywhere.
    """
    drawn = [torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(drawn).to(backend.device())


def given_latents(params: GenerationParams, shape: Sequence[int]) -> Tensor:
    """Return the request's validated latents, or noise by its seeds: fp32 [n, *shape], in diffusers' layout.

    A request for n images may give n, or one for all of them.
    """
    if params.latents is None:
        return noise(shape, params.seeds)
    try:
        latents = torch.as_tensor(params.latents).float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"latents are not a tensor: {error}", param="latents") from error
    expected = (params.n, *shape)
    if tuple(latents.shape) not in (expected, (1, *shape)):
        raise RequestError(
            f"latents have the shape {list(latents.shape)}, expected {list(expected)} for {params.n} of "
            f"{params.width} x {params.height}",
            param="latents",
        )
    if not latents.isfinite().all():
        raise RequestError("latents have values that are not finite, expected numbers", param="latents")
    return latents.expand(expected).clone().to(backend.device())


def to_pixels(images: Tensor) -> np.ndarray:
    """Convert images in [-1, 1], of any shape, to uint8."""
    pixels = ((images.float() + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8)
    return backend.place().fetch(pixels).numpy()


def resized_image(image: Any, width: int, height: int) -> Tensor:
    """Return a PIL image resized to fit, fp32 [1, 1, H, W, 3] in [-1, 1]."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise RequestError(f"image is a {type(image).__name__}, expected a PIL image", param="image")
    return as_tensor(image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS))
