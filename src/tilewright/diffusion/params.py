"""Requests for images, the limits of a pipeline on them, and the errors that a worker handles. Imports no torch.

`Limits.params` validates a request: missing settings become the pipeline's defaults, and wrong ones raise a
`RequestError` that names the value and the limit, before anything is computed.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tilewright.types import RequestError


class DiffusionLostError(RuntimeError):
    """A rank ended, hangs or failed alone, and the others cannot go on without it."""


Output = Literal["pil", "array", "latents"]
OUTPUTS: tuple[Output, ...] = ("pil", "array", "latents")

MAX_SEED = 2**63 - 1
# A text encoder reads some hundred tokens: longer texts are refused before they are tokenized.
MAX_PROMPT_CHARACTERS = 20_000


class Cancelled(Exception):
    """Raised by on_step to end a run; `generate` frees what the run holds."""


@dataclass(frozen=True)
class GenerationParams:
    """A request with every value set and validated by `Limits.params`."""

    prompt: str
    width: int
    height: int
    num_steps: int
    guidance: float
    seed: int  # of the first image; each further image has the next number
    negative_prompt: str | None = None
    image: Any = None  # a PIL image to edit or to animate
    num_frames: int = 1
    latents: Any = None  # initial latents, in diffusers' layout for the pipeline; None: noise by the seed
    n: int = 1
    output: Output = "pil"
    # Optional approximations, off by default.
    step_cache: float = 0.0  # a step whose first block changes less than this reuses the rest of the last one; 0: never
    guidance_interval: tuple[float, float] = (0.0, 1.0)  # the part of the denoising, 0 to 1, with guidance
    guidance_norm: float = 0.0  # most times that guidance may lengthen a prediction; 0: unbounded

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each image, which is the same alone as it is among others."""
        return tuple((self.seed + i) & MAX_SEED for i in range(self.n))

    def is_guided(self, sigma: float) -> bool:
        """Return whether the step at this noise level is within the interval with guidance."""
        begin, end = self.guidance_interval
        return begin <= 1.0 - sigma <= end

    def settings(self, index: int = 0) -> dict[str, Any]:
        """Return the settings that reproduce image `index` alone: the metadata of its file."""
        kept = (
            "prompt",
            "negative_prompt",
            "width",
            "height",
            "num_frames",
            "num_steps",
            "guidance",
            "step_cache",
            "guidance_norm",
        )
        found = {name: getattr(self, name) for name in kept}
        defaults = {one.name: one.default for one in fields(self)}
        optional = ("negative_prompt", "num_frames", "step_cache", "guidance_norm")
        found = {name: value for name, value in found.items() if name not in optional or value != defaults[name]}
        if self.guidance_interval != (0.0, 1.0):
            found["guidance_interval"] = list(self.guidance_interval)
        return {**found, "seed": self.seeds[index]}


@dataclass(frozen=True)
class Limits:
    """Limits of a pipeline on requests, and its defaults for missing settings."""

    size_multiple: int  # of width and height, in pixels
    default_width: int
    default_height: int
    default_steps: int
    default_guidance: float
    max_pixels: int = 4 << 20  # of one frame
    max_side: int = 4096
    min_side: int = 16
    max_steps: int = 200
    max_guidance: float = 100.0
    default_frames: int = 1
    max_frames: int = 1  # 1: the model makes only still images
    frame_multiple: int = 1  # a video has 1 + a multiple of this many frames
    fps: float = 16.0  # of videos: the rate that the model was trained with
    max_images: int = 16  # of one request
    max_prompt_tokens: int = 512  # of the text encoder, including the template
    takes_image: bool = False
    needs_image: bool = False
    image_pixels: int = 0  # default size: that of the given image, reduced to this many pixels; 0: not used
    image_area: int = 0  # default size: the given image's shape at about this many pixels; 0: not used
    takes_negative_prompt: bool = True

    def params(self, prompt: str, **given: Any) -> GenerationParams:
        """Return the validated request, with this pipeline's defaults for values that are None."""
        given = {name: value for name, value in given.items() if value is not None}
        unknown = given.keys() - {one.name for one in fields(GenerationParams)}
        if unknown:
            raise RequestError(f"{', '.join(sorted(unknown))} is not a setting of an image")
        width, height = self._size(given)
        return GenerationParams(
            prompt=_text("prompt", prompt),
            negative_prompt=self._negative_prompt(given.get("negative_prompt")),
            image=self._image(given.get("image")),
            width=width,
            height=height,
            num_frames=self._num_frames(given.get("num_frames", self.default_frames)),
            num_steps=_integer("num_steps", given.get("num_steps", self.default_steps), 1, self.max_steps),
            guidance=_number("guidance", given.get("guidance", self.default_guidance), 0.0, self.max_guidance),
            seed=_integer("seed", given.get("seed", secrets.randbelow(1 << 32)), 0, MAX_SEED),
            latents=given.get("latents"),
            n=_integer("n", given.get("n", 1), 1, self.max_images),
            output=_output(given.get("output", "pil")),
            step_cache=_number("step_cache", given.get("step_cache", 0.0), 0.0, 1.0),
            guidance_interval=_interval(given.get("guidance_interval", (0.0, 1.0))),
            guidance_norm=_number("guidance_norm", given.get("guidance_norm", 0.0), 0.0, 100.0),
        )

    def _size(self, given: Mapping[str, Any]) -> tuple[int, int]:
        sides = []
        for name, default in zip(("width", "height"), self._default_size(given.get("image")), strict=True):
            side = _integer(name, given.get(name, default), self.min_side, self.max_side)
            if side % self.size_multiple:
                below = max(side // self.size_multiple, 1) * self.size_multiple
                raise RequestError(
                    f"{name} is {side}, expected a multiple of {self.size_multiple}: {below} or "
                    f"{below + self.size_multiple}, say",
                    param=name,
                )
            sides.append(side)
        width, height = sides
        if width * height > self.max_pixels:
            raise RequestError(
                f"the size is {width} x {height}, {width * height} pixels, expected at most {self.max_pixels}: "
                f"{' x '.join(map(str, next(self.sizes_like(width, height))))}, say",
                param="width",
            )
        return width, height

    def sizes_like(self, width: int, height: int) -> Iterator[tuple[int, int]]:
        """Yield widths and heights of about this shape within the limits, the largest first."""
        for longer in range(self.max_side // self.size_multiple, 0, -1):
            shorter = max(round(longer * min(width, height) / max(width, height)), 1)
            short, long = shorter * self.size_multiple, longer * self.size_multiple
            if short >= self.min_side and short * long <= self.max_pixels:
                yield (long, short) if width >= height else (short, long)

    def _default_size(self, image: Any) -> tuple[int, int]:
        """Return the default width and height: for some models those of the request's image."""
        if self.image_area:
            last = image[-1] if isinstance(image, (list, tuple)) and image else image
            size = getattr(last, "size", None)
            if not isinstance(size, tuple) or min(size, default=0) < 1:
                return self.default_width, self.default_height
            width, height = (side // self.size_multiple for side in size_of_area(self.image_area, size))
            return width * self.size_multiple, height * self.size_multiple
        first = image[0] if isinstance(image, (list, tuple)) and image else image
        size = getattr(first, "size", None)
        if not self.image_pixels or not isinstance(size, tuple) or min(size, default=0) < 1:
            return self.default_width, self.default_height
        scale = min(math.sqrt(self.image_pixels / math.prod(size)), 1.0)
        width, height = (max(int(side * scale) // self.size_multiple, 1) * self.size_multiple for side in size)
        return width, height

    def _num_frames(self, value: Any) -> int:
        num_frames = _integer("num_frames", value, 1, self.max_frames)
        if (num_frames - 1) % self.frame_multiple:
            below = num_frames - (num_frames - 1) % self.frame_multiple
            raise RequestError(
                f"num_frames is {num_frames}, expected 1 more than a multiple of {self.frame_multiple}: {below}, say",
                param="num_frames",
            )
        return num_frames

    def _negative_prompt(self, text: Any) -> str | None:
        if text is None:
            return None
        if not self.takes_negative_prompt:
            raise RequestError("this model takes no negative_prompt", param="negative_prompt")
        return _text("negative_prompt", text)

    def _image(self, image: Any) -> Any:
        if image is not None and not self.takes_image:
            raise RequestError("this model takes no image: it makes images from text alone", param="image")
        if image is None and self.needs_image:
            raise RequestError("this model needs an image to start from", param="image")
        return image


@dataclass
class PipelineTimings:
    """Seconds of a run. Loading a component that was not in memory counts as `load_s`, not as its stage."""

    load_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return self.load_s + self.encode_s + self.denoise_s + self.decode_s


def size_of_area(area: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return width and height of about `area` pixels in the shape of `size`, multiples of 32."""
    width = math.sqrt(area * (size[0] / size[1]))
    height = width / (size[0] / size[1])
    return max(round(width / 32), 1) * 32, max(round(height / 32), 1) * 32


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} is a {type(value).__name__}, expected text", param=name)
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise RequestError(f"{name} has {len(value)} characters, expected at most {MAX_PROMPT_CHARACTERS}", param=name)
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        integer = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or not low <= integer <= high:
        raise RequestError(f"{name} is {value!r:.100}, expected an integer from {low} to {high}", param=name)
    return integer


def _number(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:  # in this form NaN fails too
        raise RequestError(f"{name} is {value!r:.100}, expected a number from {low:g} to {high:g}", param=name)
    return number


def _output(value: Any) -> Output:
    if value not in OUTPUTS:
        raise RequestError(f"output is {value!r:.100}, expected {', '.join(OUTPUTS)}", param="output")
    return value


def _interval(value: Any) -> tuple[float, float]:
    try:
        begin, end = value
    except (TypeError, ValueError):
        raise RequestError(
            f"guidance_interval is {value!r:.100}, expected two numbers", param="guidance_interval"
        ) from None
    begin = _number("the begin of guidance_interval", begin, 0.0, 1.0)
    end = _number("the end of guidance_interval", end, 0.0, 1.0)
    if begin > end:
        raise RequestError(
            f"guidance_interval is {begin:g} to {end:g}, expected the smaller first", param="guidance_interval"
        )
    return begin, end
