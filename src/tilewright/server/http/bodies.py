"""Reads a request's body within limits on its size, number of values and speed; parses it as JSON or as a form.

A form (multipart/form-data, as HTML forms and OpenAI's clients send files) is read from one buffer: its parts are
slices of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Message, Receive

from tilewright.inputs.client_json import parse_json
from tilewright.server.http.admission import MemoryReservation
from tilewright.server.http.errors import ApiError, as_api_error
from tilewright.server.http.settings import ServerSettings
from tilewright.types import RequestError

DISCARD_S = 30.0  # to read and drop the rest of a body, like nginx's lingering_time
DISCARD_SILENCE_S = 5.0  # between two pieces of it, like nginx's lingering_timeout
MIN_BYTES_PER_S = 1 << 16
# Commas and opening brackets: JSON has one for each value. An empty list is 3 bytes of a body and 64 of memory.
MAX_BODY_VALUES = 2_000_000


class BodyError(HTTPException):
    """Carries an ApiError through FastAPI, which only passes an HTTPException on while it reads a body."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message, error.headers)
        self.error = error


class BoundedBody:
    """Receives the body of a request; raises when it is too long or too slow, or the memory budget is used up."""

    def __init__(
        self, receive: Receive, settings: ServerSettings, reservation: MemoryReservation, headers: Headers
    ) -> None:
        self._receive = receive
        self._settings = settings
        # A form is not JSON: the bytes of its files are not counted as values.
        self._is_form = is_multipart(headers.get("content-type", ""))
        self._reservation = reservation
        length = headers.get("content-length", "0")
        self._declared_bytes = int(length) if length.isdecimal() else 0
        # A client that is answered before "100 Continue" may send the body or not.
        self._awaits_continue = headers.get("expect", "").lower() == "100-continue"
        self._size_bytes = 0
        self._num_values = 0
        self.is_complete = not self._declared_bytes and "transfer-encoding" not in headers
        self._began_s = time.monotonic()

    @property
    def can_be_discarded(self) -> bool:
        """True if the connection can serve another request after an answer that is sent before the rest of the body."""
        return not self._awaits_continue and self._declared_bytes <= self._settings.max_body_bytes

    def check_declared(self) -> None:
        """Raise a 413 if the declared length is above the limit."""
        if self._declared_bytes > self._settings.max_body_bytes:
            raise body_too_long(self._declared_bytes, self._settings.max_body_bytes)

    async def receive(self) -> Message:
        if self.is_complete:
            return await self._receive()
        self._awaits_continue = False
        message = await self._next()
        data = message.get("body", b"")
        self._size_bytes += len(data)
        if not self._is_form:
            self._num_values += sum(map(data.count, (b",", b"[", b"{")))
        self.is_complete = not message.get("more_body", False)
        try:
            self._reservation.add(len(data))
            if self._num_values > MAX_BODY_VALUES:
                what = f"the body has {self._num_values} commas and brackets or more"
                raise _too_large(f"{what}, the limit is {MAX_BODY_VALUES}", "body_has_too_many_values")
            if self._size_bytes > self._settings.max_body_bytes:
                raise body_too_long(self._size_bytes, self._settings.max_body_bytes)
        except ApiError as error:
            raise BodyError(error) from None
        return message

    async def _next(self) -> Message:
        """Return the next piece; raise a 408 after a silence, or when bytes arrive too slowly."""
        patience_s = self._settings.body_timeout_s
        left_s = self._began_s + patience_s + self._size_bytes / MIN_BYTES_PER_S - time.monotonic()
        try:
            return await asyncio.wait_for(self._receive(), min(patience_s, left_s))
        except asyncio.TimeoutError:
            message = f"the body is too slow: {self._size_bytes} bytes in {time.monotonic() - self._began_s:.1f} s"
            raise BodyError(ApiError(408, message, code="body_timeout", headers={"Connection": "close"})) from None

    async def discard(self) -> None:
        """Read and drop the rest, for a bounded time: a client cut off while it sends does not see the answer."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._discard(), DISCARD_S)

    async def _discard(self) -> None:
        silence_s = min(DISCARD_SILENCE_S, self._settings.body_timeout_s)
        while not self.is_complete:
            message = await asyncio.wait_for(self._receive(), silence_s)
            self.is_complete = not message.get("more_body", False)


def body_too_long(size_bytes: int, limit: int) -> ApiError:
    return _too_large(f"the body has {size_bytes} bytes or more, the limit is {limit}", "body_too_large")


def _too_large(message: str, code: str) -> ApiError:
    # The rest of the body may not all be read: the connection cannot be used again.
    return ApiError(413, message, code=code, headers={"Connection": "close"})


class JsonRequest(Request):
    """A request whose body is parsed once. Starlette's Request would keep text and values until the answer ends."""

    _text = b""

    async def body(self) -> bytes:
        self._text = b"".join([piece async for piece in self.stream()])
        return self._text

    async def json(self) -> Any:
        """Parse the body that `body` has read."""
        text, self._text = self._text, b""
        try:
            return parse_json(text, "the body")
        except RequestError as error:
            raise BodyError(as_api_error(error)) from None


class JsonRoute(APIRoute):
    """A route that passes a JsonRequest to its endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def to_json(data: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN, which Python's parser accepts and JSON does not
        return to_json(json.loads(json.dumps(data), parse_constant=lambda name: None))
    # UTF-8 cannot encode a lone surrogate: escape it.
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(JSONResponse):
    """A response whose body is one JSON object."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


MAX_PARTS = 64
MAX_PART_HEAD_BYTES = 1 << 13
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^;,\s]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r'(?<!\w)name="((?:[^"\\\r\n]|\\.)*)"')
_FILENAME = re.compile(r'filename\*?="?([^"\r\n;]*)"?')


@dataclass(frozen=True)
class FormPart:
    """A field of a form: its name, its bytes and, for a file, the file's name."""

    name: str
    data: bytes
    filename: str | None

    @property
    def text(self) -> str:
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            message = f"{self.name} is not UTF-8: byte {error.start + 1} does not belong to a character"
            raise ApiError(400, message, param=self.name) from None


def is_multipart(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def parse_multipart(body: bytes, content_type: str) -> list[FormPart]:
    """Return the parts in order; raise a 400 for a malformed body."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise _malformed("the content type has no boundary")
    delimiter = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    if body[: len(delimiter)] != delimiter:
        raise _malformed("it does not begin with the boundary")
    parts: list[FormPart] = []
    at = len(delimiter)
    while body[at : at + 2] == b"\r\n":
        end = body.find(b"\r\n" + delimiter, at + 2)
        if end < 0:
            raise _malformed("its last part does not end")
        if len(parts) == MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts, the limit")
        parts.append(_part(body, at + 2, end))
        at = end + 2 + len(delimiter)
    if body[at : at + 2] != b"--":
        raise _malformed("its boundaries are not followed by a line end")
    return parts


def _part(body: bytes, begin: int, end: int) -> FormPart:
    blank = body.find(b"\r\n\r\n", begin, min(end, begin + MAX_PART_HEAD_BYTES))
    if blank < 0:
        raise _malformed("a part has no head, or one that is too long")
    for line in body[begin:blank].decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition" and (name := _NAME.search(value)):
            filename = _FILENAME.search(value)
            return FormPart(name[1], body[blank + 4 : end], filename[1] if filename else None)
    raise _malformed("a part has no name")


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the body is not multipart/form-data: {reason}", code="invalid_multipart")
