"""The bodies of requests for pictures and videos: OpenAI's fields, and those of a diffusion model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from tilewright.diffusion.params import MAX_PROMPT_CHARACTERS
from tilewright.diffusion.requests import MAX_FPS
from tilewright.server import fields
from tilewright.server.bodies import Body, Objects, Texts
from tilewright.server.errors import ApiError

MAX_PARTIAL_IMAGES = 3  # OpenAI's; each costs a decoding
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
_SIZE = re.compile(r"(\d{1,6})\s*[xX×]\s*(\d{1,6})")


def _no_null(default: object) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


def _interval(value: object) -> object:
    """A form has text alone: "0-0.8"."""
    return value.split("-") if isinstance(value, str) else value


class DiffusionBody(Body):
    """The fields that pictures and videos share."""

    others = fields.PICTURES

    model: str | None = Field(default=None, description="the id that /v1/models returns; may be left out")
    prompt: Prompt
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    size: str | None = Field(default=None, description='such as "1024x768"; "auto": the model\'s own')
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("steps", "num_inference_steps"))
    guidance: float | None = Field(default=None, ge=0, validation_alias=AliasChoices("guidance", "guidance_scale"))
    guidance_interval: Annotated[list[float] | None, BeforeValidator(_interval)] = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="the part of the denoising, of 0 to 1, that is guided, such as [0, 0.8]",
    )
    guidance_norm: float | None = Field(default=None, ge=0)
    step_cache: float | None = Field(
        default=None, ge=0, le=1, description="skips blocks in steps that change less: faster, other pictures"
    )

    def settings(self) -> dict[str, Any]:
        """By the names of GenerationParams."""
        width, height = parse_size(self.size)
        return {
            "negative_prompt": self.negative_prompt or None,
            "width": width,
            "height": height,
            "seed": self.seed,
            "num_steps": self.steps,
            "guidance": self.guidance,
            "guidance_interval": self.guidance_interval,
            "guidance_norm": self.guidance_norm,
            "step_cache": self.step_cache,
        }


class ImageBody(DiffusionBody):
    n: int | None = Field(default=None, ge=1)
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100, description="of jpeg and webp: their quality")
    stream: Annotated[bool, _no_null(False)] = False
    partial_images: int | None = Field(default=None, ge=0, le=MAX_PARTIAL_IMAGES)
    progress: Annotated[bool, _no_null(False)] = Field(
        default=False, description="in a stream: also an event for each step, and for each change of place in the queue"
    )
    background: str | None = None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "n": self.n}


class EditBody(ImageBody):
    """The picture is a data:, http(s) or file: URL, or `images` a list of {"image_url": URL}; or part of a form."""

    image: str | Texts | None = None
    images: Objects | None = None
    mask: Any = None


class VideoBody(DiffusionBody):
    others = fields.VIDEOS

    seconds: float | None = Field(default=None, gt=0, le=3600)
    num_frames: int | None = Field(default=None, ge=1)
    fps: float | None = Field(default=None, ge=1, le=MAX_FPS, description="frames a second of the file")
    input_reference: str | dict[str, Any] | None = Field(
        default=None, description='a picture to begin with: a URL, {"image_url": URL}, or part of a form'
    )

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_frames": self.num_frames}


def parse_size(text: str | None) -> tuple[int | None, int | None]:
    """Width and height; None for the model's own."""
    if text is None or text.strip().lower() in ("auto", ""):
        return None, None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ApiError(400, f'size is {text[:40]!r}, expected such as "1024x768", or "auto"', param="size")
    return int(match[1]), int(match[2])
