"""Turns media of messages into bytes, and checks their sizes before anything is decoded."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from tilewright.host import files
from tilewright.types import MediaKind, RequestError

# The reason given for a file that a library cannot decode: the library's message means little to a client.
UNREADABLE = "the file is damaged, cut short, or of a kind that is not supported"
_JPEG_FRAMES = "data:video/jpeg;base64,"


@dataclass(frozen=True)
class MediaLimits:
    """Limits on a request's media, checked before anything is decoded."""

    max_bytes: int = 128 * 2**20  # of one item, as it arrives
    max_pixels: int = 2**26  # of one image or frame: 8192 x 8192, 200 MB once decoded
    max_frames: int = 768  # of one video, after sampling
    max_duration_s: float = 3600.0  # of one video or sound
    max_items: int = 64  # images, videos and sounds of a request
    max_total_bytes: int = 512 * 2**20  # of all items of a request, as they arrive
    max_decode_s: float = 60.0  # for one item; applies to decoder processes only, which can be stopped
    allow_paths: bool = True  # servers turn this off: a path in a message would read their files
    allow_precomputed: bool = True  # patches and features in place of media; servers turn this off too


@dataclass(frozen=True)
class MediaPart:
    """A medium as a request gives it, not yet read: `normalize` finds it in messages, an Opener opens it."""

    kind: MediaKind
    name: str  # for errors: "image 2"
    source: Any  # bytes, a path, a PIL image, an array or tensor; for video also a list of frames
    fps: float | None = None  # of a video given as frames
    with_sound: bool = False  # read a video's sound with its frames


def open_url(url: str, name: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a data: URL; raise RequestError for others: a server has fetched them already."""
    scheme = url.split(":", 1)[0].lower() if ":" in url[:16] else ""
    if scheme == "data":
        return _decode_data_url(url, name, limits)
    if scheme in ("http", "https"):
        raise RequestError(f"{name}: {url[:100]} is not fetched here: pass its bytes, or a file")
    raise RequestError(f"{name}: the URL begins with {url[:20]!r}, expected data:, http: or https:")


def check_data_url(url: str, name: str, limits: MediaLimits) -> int:
    """Return an upper bound of a data: URL's bytes without decoding it; raise RequestError if it is too large."""
    comma = url.find(",")
    if comma < 0:
        raise RequestError(f"{name}: the data: URL has no comma")
    # Four base64 characters encode three bytes; percent-encoding uses three characters for one byte.
    num_characters = len(url) - comma - 1 - 2 * url.count("%", comma)
    size_bytes = num_characters // 4 * 3 if _is_base64(url, comma) else num_characters
    _check_size(size_bytes, name, limits)
    return size_bytes


def _is_base64(url: str, comma: int) -> bool:
    return url[max(comma - len(";base64"), 0) : comma].lower() == ";base64"


def _decode_data_url(url: str, name: str, limits: MediaLimits) -> bytes:
    check_data_url(url, name, limits)
    comma = url.find(",")
    body = url[comma + 1 :]
    if not _is_base64(url, comma):
        return check_bytes(unquote_to_bytes(body), name, limits)
    return check_bytes(decode_base64(body, name), name, limits)


def decode_base64(text: str, name: str, what: str = "the data: URL") -> bytes:
    """Return the decoded bytes; raise RequestError, with the name `what` of the text, if it is not base64."""
    characters = "".join((unquote(text) if "%" in text else text).split())
    try:
        return base64.b64decode(characters, validate=True)
    except ValueError as error:
        raise RequestError(f"{name}: {what} is not base64: {base64_fault(characters)}") from error


def base64_fault(text: str) -> str:
    """Return the reason why a text is not base64."""
    if wrong := re.search(r"[^A-Za-z0-9+/=]", text):
        return f"it has {wrong[0]!a}, expected letters, digits, + and /"
    return "it does not end with a complete group of four characters, padded with ="


def num_frames_of_url(url: str) -> int:
    """Return the number of frames in a URL of vLLM's form, data:video/jpeg;base64,FRAME,FRAME,...; 0 for others."""
    return url.count(",") if url[: len(_JPEG_FRAMES)].lower() == _JPEG_FRAMES else 0


def open_frames_url(url: str, name: str, limits: MediaLimits) -> list[bytes]:
    """Return the encoded frames of a URL of that form."""
    check_data_url(url, name, limits)
    frames = url[len(_JPEG_FRAMES) :].split(",")
    names = [f"{name}, frame {index + 1}" for index in range(len(frames))]
    return [check_bytes(decode_base64(frame, one), one, limits) for frame, one in zip(frames, names, strict=True)]


def read_source(part: MediaPart, limits: MediaLimits) -> Any:
    """Return the bytes of a path, URL or bytes-like object; return other sources (images, arrays) unchanged."""
    source = part.source
    if isinstance(source, str) and source[:5].lower() in ("data:", "http:", "https"):
        return open_url(source, part.name, limits)
    if isinstance(source, str | Path):
        return _read_file(Path(source), part.name, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return check_bytes(bytes(source), part.name, limits)
    return source


def _read_file(path: Path, name: str, limits: MediaLimits) -> bytes:
    if not limits.allow_paths:
        raise RequestError(f"{name}: files are not read here: pass a data: URL")
    try:
        return check_bytes(files.read_bytes(path, limits.max_bytes), name, limits)
    except OSError as error:
        raise RequestError(f"{name}: {path} cannot be read: {error.strerror or error}") from error


def check_bytes(data: bytes, name: str, limits: MediaLimits) -> bytes:
    """Return the bytes; raise RequestError if there are none or too many."""
    if not data:
        raise RequestError(f"{name}: it is empty")
    _check_size(len(data), name, limits)
    return data


def _check_size(size_bytes: int, name: str, limits: MediaLimits) -> None:
    if size_bytes > limits.max_bytes:
        raise RequestError(f"{name}: {size_bytes} bytes or more, the limit is {limits.max_bytes} (--max-media-bytes)")


def check_count(num_items: int, name: str, limits: MediaLimits) -> None:
    """Raise RequestError if a request has too many items."""
    if num_items > limits.max_items:
        most = f"more than {limits.max_items} images, videos and sounds"
        raise RequestError(f"{name}: the request has {most}, the limit (--max-media)")


def check_total(size_bytes: int, name: str, limits: MediaLimits) -> None:
    """Raise RequestError if a request's media have too many bytes."""
    if size_bytes > limits.max_total_bytes:
        raise RequestError(f"{name}: the request's media are more than {limits.max_total_bytes} bytes, the limit")


def check_pixels(height: int, width: int, name: str, limits: MediaLimits) -> None:
    """Raise RequestError for a size above the limit, before any pixel is decoded."""
    if height < 1 or width < 1:
        raise RequestError(f"{name}: its size is {width} x {height}, expected at least 1 x 1")
    if height * width > limits.max_pixels:
        pixels = f"{width} x {height} = {height * width} pixels"
        raise RequestError(f"{name}: {pixels}, the limit is {limits.max_pixels} (--max-pixels)")


def check_duration(duration_s: float, name: str, limits: MediaLimits) -> None:
    """Raise RequestError for a video or a sound that is too long."""
    if not duration_s <= limits.max_duration_s:  # NaN fails too
        raise RequestError(f"{name}: {duration_s:.1f} seconds, the limit is {limits.max_duration_s:g} (--max-duration)")


def content_key(content: bytes, *what: object) -> bytes:
    """Return a hash of 16 bytes of the content and its preprocessing."""
    digest = hashlib.blake2b(content, digest_size=16)
    # The length separates content and parameters, so that different pairs do not hash the same bytes.
    digest.update(repr((len(content), *what)).encode())
    return digest.digest()
