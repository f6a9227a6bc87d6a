"""What the media of a request are read from: data: URLs, http(s) and file: URLs, and paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.inputs.media import (
    MediaKind,
    MediaLimits,
    check_count,
    check_data_url,
    check_total,
    num_frames_of_url,
)
from tilewright.inputs.messages import source_of
from tilewright.inputs.precomputed import TYPES, check_allowed, check_bytes_told, type_of
from tilewright.types import RequestError

MAX_SOURCE_LENGTH = 8192  # characters of a URL or a path; a data: URL has limits of its own


@dataclass(eq=False)
class Source:
    """A URL or a path, and its bytes once they were read."""

    text: str
    name: str  # of the first item that uses it, for errors: "image 2"
    is_frames: bool = False  # a data: URL with the frames of a video
    num_uses: int = 0
    size_bytes: int = 0  # counted so far; of a data: URL, an estimate until it is decoded
    data: bytes | list[bytes] | None = None

    @property
    def scheme(self) -> str:
        return scheme_of(self.text)


class MediaSources:
    """The sources of all media of one request, within its limits."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._inline: list[Source] = []
        self._by_text: dict[str, Source] = {}  # without data: URLs, which are long and rarely equal
        self._num_items: Counter[MediaKind] = Counter()
        self._num_frames = 0  # of videos that are given as frames
        self._total_bytes = 0

    def __iter__(self) -> Iterator[Source]:
        """Each source once, however many parts use it."""
        yield from self._inline
        yield from self._by_text.values()

    def plan(self, message: Any) -> Any:
        """The message with a Source for each URL and path. Messages of other forms stay as they are: the engine
        rejects them by name."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [self._plan_part(part) for part in message["content"]]}

    def grow(self, source: Source, num_bytes: int) -> None:
        """Counts more bytes of a source, once for each part that uses it: each is a copy for the engine."""
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

    def _plan_values(self, part: Mapping[str, Any], value_type: str) -> Source:
        """Of the base64 that stands for what would be made of a medium."""
        name = self._count_item(TYPES[value_type].kind)
        check_allowed(value_type, name, self._limits)
        values = part.get(value_type)
        if not isinstance(values, str):
            found = type(values).__name__
            raise RequestError(f"{name}: {value_type} is a {found}, expected base64 of its bytes, dtype and shape")
        check_bytes_told(part, name, self._limits)
        return self._add(f"data:application/octet-stream;base64,{values}", name, must_be_url=True)

    def _count_item(self, kind: MediaKind) -> str:
        """The item's name."""
        self._num_items[kind] += 1
        name = f"{kind} {self._num_items[kind]}"
        check_count(self._num_items.total(), name, self._limits)
        return name

    def _add(self, text: str, name: str, must_be_url: bool, is_frames: bool = False) -> Source:
        if scheme_of(text) == "data":
            source = Source(text, name, is_frames, num_uses=1)
            # check_data_url counts each "%" as an escape of three characters: many bare ones would count below zero.
            self.grow(source, max(0, check_data_url(text, name, self._limits)))
            self._inline.append(source)
            return source
        if len(text) > MAX_SOURCE_LENGTH:
            raise RequestError(f"{name}: the URL has {len(text)} characters, the limit is {MAX_SOURCE_LENGTH}")
        if must_be_url and not scheme_of(text):
            raise RequestError(f"{name}: the URL begins with {text[:20]!r}, expected data:, http:, https: or file:")
        source = self._by_text.setdefault(text, Source(text, name))
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
    """A planned message with the bytes of its Sources in their places."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_filled_part(part) for part in message["content"]]}


def _filled_part(part: Any) -> Any:
    return {key: _data(value) for key, value in part.items()} if isinstance(part, Mapping) else part


def _data(value: Any) -> Any:
    if isinstance(value, list):
        return [_data(item) for item in value]
    return value.data if isinstance(value, Source) else value


def scheme_of(source: str) -> str:
    """data, http, https or file, if it begins with one of them; a path begins with none."""
    scheme, colon, _ = source[:6].lower().partition(":")
    return scheme if colon and scheme in ("data", "http", "https", "file") else ""
