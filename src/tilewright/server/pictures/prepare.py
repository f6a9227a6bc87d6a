"""The PictureRequest of a body, with the picture to edit or to animate as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from tilewright.diffusion.requests import PictureRequest
from tilewright.inputs.client_json import parse_json
from tilewright.inputs.media import MediaLimits, check_bytes
from tilewright.server.endpoints import Gate
from tilewright.server.errors import ApiError, validation_error
from tilewright.server.multipart import is_multipart, parse_multipart
from tilewright.server.pictures.bodies import DiffusionBody, EditBody, ImageBody, VideoBody
from tilewright.types import RequestError

# What a pipeline calls a setting, and what a client does.
_CLIENT_NAMES = {"num_steps": "steps", "width": "size", "height": "size"}
_JPEG_QUALITY = 95

BodyType = TypeVar("BodyType", bound=DiffusionBody)
Hold = Callable[[int], None]


async def read_body(kind: type[BodyType], request: Request, file_field: str) -> tuple[BodyType, bytes | None]:
    """The body, JSON or a form, and the file that a form has as `file_field`."""
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
            fields[name] = f"a file, {len(part.data)} bytes"  # refused by name, where it is not known
        else:
            fields[name] = part.text
    if len(files) > 1:
        raise _one_picture(file_field, len(files))
    return _validated(kind, fields, is_form=True), files[0] if files else None


def _validated(kind: type[BodyType], fields: Any, *, is_form: bool = False) -> BodyType:
    """A form has text alone, which stands for numbers too."""
    try:
        return kind.model_validate(fields, strict=not is_form)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def image_request(body: ImageBody, picture: bytes | None = None) -> PictureRequest:
    if body.background == "transparent":
        raise ApiError(
            400, "background is 'transparent', which is not supported: pictures are opaque", param="background"
        )
    if body.partial_images and not body.stream:
        raise ApiError(
            400, f"partial_images is {body.partial_images}, expected stream: true with it", param="partial_images"
        )
    return PictureRequest(
        body.prompt,
        _given(body.settings()),
        picture,
        file_format=body.output_format or "png",
        quality=_JPEG_QUALITY if body.output_compression is None else body.output_compression,
        num_previews=body.partial_images or 0,
    )


def video_request(body: VideoBody, picture: bytes | None = None) -> PictureRequest:
    return PictureRequest(
        body.prompt,
        _given(body.settings()),
        picture,
        file_format="mp4",
        seconds=body.seconds,
        fps=body.fps,
    )


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def edit_source(body: EditBody) -> str | None:
    """The URL of the picture to edit; None: the body names none."""
    if body.mask is not None:
        message = "mask is given, which is not supported: the whole picture is edited"
        raise ApiError(400, message, param="mask", code="unsupported_parameter")
    sources = [body.image] if isinstance(body.image, str) else list(body.image or ())
    sources += [_url_of(one, "images") for one in body.images or ()]
    if len(sources) > 1:
        raise _one_picture("image", len(sources))
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


def _one_picture(field: str, count: int) -> ApiError:
    return ApiError(400, f"{field} has {count} pictures, expected one: others are not used", param=field)


async def read_picture(
    source: str | None, file: bytes | None, field: str, gate: Gate, hold: Hold, limits: MediaLimits
) -> bytes | None:
    """The bytes of a picture by URL or of a form, through the same gate as those of a chat."""
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


def client_error(error: RequestError, picture_field: str = "image") -> RequestError:
    """The error with the field named as the client names it."""
    param = error.param or ""
    name = picture_field if param == "image" else _CLIENT_NAMES.get(param, param)
    message = str(error)
    if name == "size":
        message = f"size: {message}"
    elif param and name != param:
        message = re.sub(rf"^{re.escape(param)}\b", name, message)
    return RequestError(message, param=name or "prompt", code=error.code)
