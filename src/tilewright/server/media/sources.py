"""The sources of a request's media: data: URLs, http(s) URLs, and files in the folders of --allow-files.

Python's base64 decoder holds the interpreter lock: 20 MB in one call would stop the event loop for 0.2 s. A data: URL
is decoded in pieces, and other threads run in between.
"""

from __future__ import annotations

import base64
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from tilewright.inputs.media import (
    MediaLimits,
    base64_fault,
    check_bytes,
    check_count,
    check_data_url,
    check_total,
    num_frames_of_url,
)
from tilewright.inputs.messages import source_of
from tilewright.inputs.precomputed import TYPES, check_allowed, check_bytes_told, type_of
from tilewright.types import MediaKind, RequestError

PIECE_CHARACTERS = 1 << 16  # 0.7 ms of decoding


def decode_data_url(url: str, name: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a data: URL that `check_data_url` accepts.

    Raise RequestError, with the item's name, for a URL that is not base64, empty or too large.
    """
    comma = url.index(",")
    return _decode(url, name, limits, start=comma + 1, is_base64=url[:comma].lower().endswith(";base64"))


def decode_frames_url(url: str, name: str, limits: MediaLimits) -> list[bytes]:
    """Return the encoded frames of a video URL in vLLM's form: data:video/jpeg;base64,FRAME,FRAME,..."""
    frames = url[url.index(",") + 1 :].split(",")
    return [_decode(frame, f"{name}, frame {number}", limits) for number, frame in enumerate(frames, 1)]


def _decode(text: str, name: str, limits: MediaLimits, start: int = 0, is_base64: bool = True) -> bytes:
    data = bytearray()
    pieces = _pieces(text, start)
    try:
        for piece in _base64_pieces(pieces) if is_base64 else map(unquote_to_bytes, pieces):
            data += piece
            if len(data) > limits.max_bytes:
                break  # refused below
    except ValueError as error:
        fault = f"base64: {error}" if is_base64 else "text: it has half of a surrogate pair"
        raise RequestError(f"{name}: the data: URL is not {fault}") from error
    return check_bytes(bytes(data), name, limits)


def _pieces(text: str, start: int) -> Iterator[str]:
    """Yield pieces of the text from `start` on, never cut within an escape such as %2B."""
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text) and (escape := text.rfind("%", end - 2, end)) > start:
            end = escape
        yield text[start:end]
        start = end


def _base64_pieces(pieces: Iterator[str]) -> Iterator[bytes]:
    left = ""  # the beginning of a group of four characters
    num_characters, has_padding = 0, False
    for piece in pieces:
        characters = left + "".join((unquote(piece) if "%" in piece else piece).split())
        whole = len(characters) // 4 * 4
        left = characters[whole:]
        if whole and has_padding:
            raise ValueError("it continues after its padding")
        has_padding = has_padding or characters.endswith("=", 0, whole)
        num_characters += whole
        yield _decoded(characters[:whole])
    if num_characters and not has_padding and not left.strip("="):
        return  # superfluous padding, which Python's decoder also allows
    if len(left) == 1:
        raise ValueError(f"{num_characters + 1} characters, one more than a multiple of 4")
    yield _decoded(left)


def _decoded(characters: str) -> bytes:
    try:
        return base64.b64decode(characters, validate=True)
    except ValueError:
        raise ValueError(base64_fault(characters)) from None


class FileError(RequestError):
    """A file could not be read. The message has the reason, without its path and the item's name."""


class FolderReader:
    """Reads regular files in the given folders; symbolic links and .. cannot lead out of them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise RequestError(f"--allow-files {folder} is not a folder")
        self._given = [os.path.abspath(folder) for folder in folders]
        self._real = [os.path.realpath(folder) for folder in folders]

    def read(self, source: str, max_bytes: int) -> bytes:
        """Return the contents of a path or a file: URL; raise FileError if it is not allowed or not readable."""
        try:
            path = os.path.abspath(_path_of(source))
            # Check before accessing the disk: errors must not reveal which other files exist.
            if not _is_within(path, [*self._given, *self._real]):
                raise _not_allowed()
            return self._read(path, max_bytes)
        except FileError:
            raise
        except (OSError, ValueError) as error:
            raise FileError(f"cannot be read: {getattr(error, 'strerror', None) or 'it is not a path'}") from None

    def _read(self, path: str, max_bytes: int) -> bytes:
        real = os.path.realpath(path)
        if not _is_within(real, self._real):
            raise _not_allowed()
        # Opening a pipe or a device could block or have effects.
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY)
        try:
            # A folder of the path may have become a link meanwhile: check the path of the open file.
            if not _is_within(os.readlink(f"/proc/self/fd/{handle}"), self._real):
                raise _not_allowed()
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise FileError("it is not a regular file")
            if status.st_size > max_bytes:
                raise FileError(f"{status.st_size} bytes, the limit is {max_bytes}")
            with open(handle, "rb", closefd=False) as file:
                return file.read(max_bytes)
        finally:
            os.close(handle)


def _path_of(source: str) -> str:
    if not source.lower().startswith("file:"):
        return source
    parts = urlsplit(source)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise FileError("expected file:///PATH")
    return path


def _is_within(path: str, folders: Sequence[str]) -> bool:
    return any(os.path.commonpath([path, folder]) == folder for folder in folders)


def _not_allowed() -> FileError:
    return FileError("files are read only from folders given with --allow-files DIR")


MAX_SOURCE_LENGTH = 8192  # characters of a URL or a path; a data: URL has limits of its own


@dataclass(eq=False)
class MediaSource:
    """A URL or a path in a request, and its bytes once they were read: the engine gets those in its place."""

    text: str
    name: str  # of the first item that uses it, for errors: "image 2"
    is_frames: bool = False  # a data: URL with the frames of a video
    num_uses: int = 0
    size_bytes: int = 0  # counted so far; for a data: URL an estimate until it is decoded
    data: bytes | list[bytes] | None = None

    @property
    def scheme(self) -> str:
        return scheme_of(self.text)


class MediaSources:
    """The sources of all media of one request, checked against its limits."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._inline: list[MediaSource] = []
        self._by_text: dict[str, MediaSource] = {}  # no data: URLs, which are long and rarely equal
        self._num_items: Counter[MediaKind] = Counter()
        self._num_frames = 0  # of videos that are given as frames
        self._total_bytes = 0

    def __iter__(self) -> Iterator[MediaSource]:
        """Yield each source once, however many parts use it."""
        yield from self._inline
        yield from self._by_text.values()

    def plan(self, message: Any) -> Any:
        """Return the message with a MediaSource for each URL and path. Malformed messages are returned unchanged:
        the engine rejects them by name.
        """
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [self._plan_part(part) for part in message["content"]]}

    def grow(self, source: MediaSource, num_bytes: int) -> None:
        """Count more bytes of a source, once per part that uses it: each is a copy for the engine."""
        source.size_bytes += num_bytes
        self._count(num_bytes * source.num_uses, source.name)

    def _plan_part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        value_type = type_of(part)
        if value_type is not None:
            return {**part, value_type: self._plan_values(part, value_type)}
        found = source_of(part)
        if found is None:
            return part
        kind, given, must_be_url = found
        name = self._count_item(kind)
        if isinstance(given, str):
            num_frames = num_frames_of_url(given) if kind == "video" else 0
            self._count_frames(num_frames, name)
            planned: Any = self._add(given, name, must_be_url, is_frames=must_be_url and num_frames > 0)
        elif isinstance(given, list):
            self._count_frames(len(given), name)
            planned = [
                self._add(frame, f"{name}, frame {number}", must_be_url) if isinstance(frame, str) else frame
                for number, frame in enumerate(given, 1)
            ]
        else:
            return part
        rest = {key: value for key, value in part.items() if key not in (f"{kind}_url", "input_audio")}
        return {**rest, "type": kind, kind: planned}

    def _plan_values(self, part: Mapping[str, Any], value_type: str) -> MediaSource:
        """Return the source of precomputed values, which a part has as base64."""
        name = self._count_item(TYPES[value_type].kind)
        check_allowed(value_type, name, self._limits)
        values = part.get(value_type)
        if not isinstance(values, str):
            found = type(values).__name__
            raise RequestError(f"{name}: {value_type} is a {found}, expected base64 of its bytes, dtype and shape")
        check_bytes_told(part, name, self._limits)
        return self._add(f"data:application/octet-stream;base64,{values}", name, must_be_url=True)

    def _count_item(self, kind: MediaKind) -> str:
        """Count an item and return its name."""
        self._num_items[kind] += 1
        name = f"{kind} {self._num_items[kind]}"
        check_count(self._num_items.total(), name, self._limits)
        return name

    def _add(self, text: str, name: str, must_be_url: bool, is_frames: bool = False) -> MediaSource:
        if scheme_of(text) == "data":
            source = MediaSource(text, name, is_frames, num_uses=1)
            # check_data_url counts each "%" as an escape of three characters: many bare ones give a negative size.
            self.grow(source, max(0, check_data_url(text, name, self._limits)))
            self._inline.append(source)
            return source
        if len(text) > MAX_SOURCE_LENGTH:
            raise RequestError(f"{name}: the URL has {len(text)} characters, the limit is {MAX_SOURCE_LENGTH}")
        if must_be_url and not scheme_of(text):
            raise RequestError(f"{name}: the URL begins with {text[:20]!r}, expected data:, http:, https: or file:")
        source = self._by_text.setdefault(text, MediaSource(text, name))
        source.num_uses += 1
        return source

    def _count_frames(self, num_frames: int, name: str) -> None:
        self._num_frames += num_frames
        if self._num_frames > self._limits.max_frames:
            raise RequestError(
                f"{name}: {self._num_frames} frames, the limit is {self._limits.max_frames} (--max-frames)"
            )

    def _count(self, num_bytes: int, name: str) -> None:
        self._total_bytes += num_bytes
        check_total(self._total_bytes, name, self._limits)


def filled(message: Any) -> Any:
    """Return a planned message with the bytes of its MediaSources in their places."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_filled_part(part) for part in message["content"]]}


def _filled_part(part: Any) -> Any:
    return {key: _data(value) for key, value in part.items()} if isinstance(part, Mapping) else part


def _data(value: Any) -> Any:
    if isinstance(value, list):
        return [_data(item) for item in value]
    return value.data if isinstance(value, MediaSource) else value


def scheme_of(source: str) -> str:
    """Return data, http, https or file if the source begins with one of them; "" for a path."""
    scheme, colon, _ = source[:6].lower().partition(":")
    return scheme if colon and scheme in ("data", "http", "https", "file") else ""
