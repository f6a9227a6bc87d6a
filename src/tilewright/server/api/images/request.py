"""Requests for images and videos: bodies with OpenAI's fields and a diffusion model's, made into DiffusionRequests.

The image to edit or animate is read here as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import AliasChoices, BeforeValidator, Field, ValidationError

from tilewright.diffusion.params import MAX_PROMPT_CHARACTERS
from tilewright.diffusion.requests import MAX_FPS, DiffusionRequest
from tilewright.inputs.client_json import parse_json
from tilewright.inputs.media import MediaLimits, check_bytes
from tilewright.server.api import fields
from tilewright.server.api.bodies import Body, Objects, Texts
from tilewright.server.api.endpoints import Gate
from tilewright.server.http.admission import ReserveMemory
from tilewright.server.http.bodies import is_multipart, parse_multipart
from tilewright.server.http.errors import ApiError, validation_error
from tilewright.types import RequestError

MAX_PARTIAL_IMAGES = 3  # OpenAI's limit; each costs a decoding
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
_SIZE = re.compile(r"(\d{1,6})\s*[xX×]\s*(\d{1,6})")


def _no_null(default: object) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


def _interval(value: object) -> object:
    """Split "0-0.8" into two values: forms contain text only."""
    return value.split("-") if isinstance(value, str) else value


class DiffusionBody(Body):
    """The fields that images and videos share."""

    others = fields.IMAGES

    model: str | None = Field(default=None, description="the id that /v1/models returns; may be left out")
    prompt: Prompt
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    size: str | None = Field(default=None, description='such as "1024x768"; "auto": the model\'s default')
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("steps", "num_inference_steps"))
    guidance: float | None = Field(default=None, ge=0, validation_alias=AliasChoices("guidance", "guidance_scale"))
    guidance_interval: Annotated[list[float] | None, BeforeValidator(_interval)] = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="the part of the denoising (0 to 1) that is guided, such as [0, 0.8]",
    )
    guidance_norm: float | None = Field(default=None, ge=0)
    step_cache: float | None = Field(
        default=None, ge=0, le=1, description="skips blocks in steps that change less: faster, different images"
    )

    def settings(self) -> dict[str, Any]:
        """Return the settings under the names of GenerationParams."""
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
    output_compression: int | None = Field(default=None, ge=0, le=100, description="quality of jpeg and webp")
    stream: Annotated[bool, _no_null(False)] = False
    partial_images: int | None = Field(default=None, ge=0, le=MAX_PARTIAL_IMAGES)
    progress: Annotated[bool, _no_null(False)] = Field(
        default=False, description="streams also have an event for each step, and for each change of place in the queue"
    )
    background: str | None = None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "n": self.n}


class EditBody(ImageBody):
    """An edit. The image is a data:, http(s) or file: URL, a part of a form, or `images`: [{"image_url": URL}]."""

    image: str | Texts | None = None
    images: Objects | None = None
    mask: Any = None


class VideoBody(DiffusionBody):
    others = fields.VIDEOS

    seconds: float | None = Field(default=None, gt=0, le=3600)
    num_frames: int | None = Field(default=None, ge=1)
    fps: float | None = Field(default=None, ge=1, le=MAX_FPS, description="frames a second of the file")
    input_reference: str | dict[str, Any] | None = Field(
        default=None, description='the first frame: a URL, {"image_url": URL}, or a part of a form'
    )

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_frames": self.num_frames}


def parse_size(text: str | None) -> tuple[int | None, int | None]:
    """Return width and height; None for the model's default."""
    if text is None or text.strip().lower() in ("auto", ""):
        return None, None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ApiError(400, f'size is {text[:40]!r}, expected such as "1024x768", or "auto"', param="size")
    return int(match[1]), int(match[2])


# Names of settings in a pipeline, and in a client's request.
_CLIENT_NAMES = {"num_steps": "steps", "width": "size", "height": "size"}
_JPEG_QUALITY = 95

BodyType = TypeVar("BodyType", bound=DiffusionBody)


async def read_body(kind: type[BodyType], request: Request, file_field: str) -> tuple[BodyType, bytes | None]:
    """Read a JSON body or a form; return the body and the form's file named `file_field`, if any."""
    data = b"".join([piece async for piece in request.stream()])
    content_type = request.headers.get("content-type", "")
    if not is_multipart(content_type):
        if not data:
            raise ApiError(400, "the body is empty, expected a JSON object or a form")
        return _validated(kind, parse_json(data, "the body")), None
    fields: dict[str, Any] = {}
    files: list[bytes] = []
    for part in parse_multipart(data, content_type):
        name = part.name.removesuffix("[]")
        if part.filename is not None and name == file_field:
            files.append(part.data)
        elif part.filename is not None:
            fields[name] = f"a file, {len(part.data)} bytes"  # refused by name if the field is unknown
        else:
            fields[name] = part.text
    if len(files) > 1:
        raise _one_image(file_field, len(files))
    return _validated(kind, fields, is_form=True), files[0] if files else None


def _validated(kind: type[BodyType], fields: Any, *, is_form: bool = False) -> BodyType:
    """Validate a body. Forms contain text only, so that in a form "7" is accepted as a number."""
    try:
        return kind.model_validate(fields, strict=not is_form)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def image_request(body: ImageBody, image: bytes | None = None) -> DiffusionRequest:
    if body.background == "transparent":
        raise ApiError(
            400, "background is 'transparent', which is not supported: images are opaque", param="background"
        )
    if body.partial_images and not body.stream:
        raise ApiError(
            400, f"partial_images is {body.partial_images}, expected stream: true with it", param="partial_images"
        )
    return DiffusionRequest(
        body.prompt,
        _given(body.settings()),
        image,
        file_format=body.output_format or "png",
        quality=_JPEG_QUALITY if body.output_compression is None else body.output_compression,
        num_previews=body.partial_images or 0,
    )


def video_request(body: VideoBody, image: bytes | None = None) -> DiffusionRequest:
    return DiffusionRequest(
        body.prompt,
        _given(body.settings()),
        image,
        file_format="mp4",
        seconds=body.seconds,
        fps=body.fps,
    )


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def edit_source(body: EditBody) -> str | None:
    """Return the URL of the image to edit; None if the body has none."""
    if body.mask is not None:
        message = "mask is given, which is not supported: the whole image is edited"
        raise ApiError(400, message, param="mask", code="unsupported_parameter")
    sources = [body.image] if isinstance(body.image, str) else list(body.image or ())
    sources += [_url_of(one, "images") for one in body.images or ()]
    if len(sources) > 1:
        raise _one_image("image", len(sources))
    return sources[0] if sources else None


def reference_source(body: VideoBody) -> str | None:
    given = body.input_reference
    return _url_of(given, "input_reference") if isinstance(given, dict) else given


def _url_of(given: Mapping[str, Any], field: str) -> str:
    url = given.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise ApiError(400, f'{field} has no image_url, expected {{"image_url": URL}}', param=field)
    return url


def _one_image(field: str, count: int) -> ApiError:
    return ApiError(400, f"{field} is {count} images, expected one: others are not used", param=field)


async def read_image(
    source: str | None, file: bytes | None, field: str, gate: Gate, hold: ReserveMemory, limits: MediaLimits
) -> bytes | None:
    """Return the bytes of an image from a URL or a form, read through the same gate as a chat's images."""
    try:
        if file is not None:
            return check_bytes(file, field, limits)
        if source is None:
            return None
        part = {"type": "image_url", "image_url": {"url": source}}
        (message,) = await gate.resolve([{"role": "user", "content": [part]}], hold)
        return message["content"][0]["image"]
    except RequestError as error:
        raise RequestError(str(error), param=field, code=error.code) from error


def client_error(error: RequestError, image_field: str = "image") -> RequestError:
    """Return the error with the client's name for the field."""
    param = error.param or ""
    name = image_field if param == "image" else _CLIENT_NAMES.get(param, param)
    message = str(error)
    if name == "size":
        message = f"size: {message}"
    elif param and name != param:
        message = re.sub(rf"^{re.escape(param)}\b", name, message)
    return RequestError(message, param=name or "prompt", code=error.code)
