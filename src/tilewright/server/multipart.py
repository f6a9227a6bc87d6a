"""Bodies of multipart/form-data, as HTML forms and OpenAI's clients send files.

Read from one buffer, which `bounded_body` has bounded: the parts are slices of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright.server.errors import ApiError

MAX_PARTS = 64
MAX_PART_HEAD_BYTES = 1 << 13
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^;,\s]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r'(?<!\w)name="((?:[^"\\\r\n]|\\.)*)"')
_FILENAME = re.compile(r'filename\*?="?([^"\r\n;]*)"?')


@dataclass(frozen=True)
class Part:
    """One field: its name, its bytes, and the name of the file if it is one."""

    name: str
    data: bytes
    filename: str | None

    @property
    def text(self) -> str:
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            message = f"{self.name} is not UTF-8: byte {error.start + 1} is no part of a character"
            raise ApiError(400, message, param=self.name) from None


def is_multipart(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def parse_multipart(body: bytes, content_type: str) -> list[Part]:
    """The parts in order; 400 for a body that is not of this form."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise _malformed("the content type has no boundary")
    delimiter = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    if body[: len(delimiter)] != delimiter:
        raise _malformed("it does not begin with the boundary")
    parts: list[Part] = []
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


def _part(body: bytes, begin: int, end: int) -> Part:
    blank = body.find(b"\r\n\r\n", begin, min(end, begin + MAX_PART_HEAD_BYTES))
    if blank < 0:
        raise _malformed("a part has no head, or one that is too long")
    for line in body[begin:blank].decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition" and (name := _NAME.search(value)):
            filename = _FILENAME.search(value)
            return Part(name[1], body[blank + 4 : end], filename[1] if filename else None)
    raise _malformed("a part has no name")


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the body is not multipart/form-data: {reason}", code="invalid_multipart")
