"""The media of a request, resolved before the engine hears of it: the engine's process fetches and opens nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.inputs.media import (
    MediaLimits,
    check_bytes,
    check_count,
    check_data_url,
    check_total,
    num_frames_of_url,
)
from tilewright.inputs.messages import source_of
from tilewright.server.media.fetch import MAX_CONNECTIONS, Fetcher, FetchError
from tilewright.server.media.files import FileError, FolderReader
from tilewright.types import MediaKind, RequestError

_MAX_AT_ONCE = 8  # items of one request
_NUM_READERS = 4  # threads that read files
_MAX_SOURCE_LENGTH = 8192  # characters of a URL or a path


@dataclass(frozen=True)
class MediaPolicy:
    """What requests may bring, and where it may come from."""

    limits: MediaLimits = field(default_factory=MediaLimits)
    allow_private_addresses: bool = False
    folders: tuple[Path, ...] = ()  # whose files may be read, by path or file: URL; empty: none
    timeout_s: float = 30.0  # for one item, redirects included
    max_redirects: int = 3


class MediaGate:
    """Brings the media of requests, many requests at once."""

    def __init__(self, policy: MediaPolicy, fetcher: Fetcher | None = None) -> None:
        self._policy = policy
        self._fetcher = fetcher or Fetcher(
            max_redirects=policy.max_redirects,
            timeout_s=policy.timeout_s,
            allow_private=policy.allow_private_addresses,
        )
        self._files = FolderReader(policy.folders)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "read-media")
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def resolve(
        self, messages: list[dict[str, Any]], hold: Callable[[int], None] = lambda num_bytes: None
    ) -> list[dict[str, Any]]:
        """The messages with the bytes of each http(s) and file medium in its place; data: URLs stay as they are.

        `hold` is told of bytes that come before they are kept, and may refuse them.
        RequestError names the item that is too large, one too many, not allowed or not to be had.
        """
        needs = _Needs(self._policy.limits)
        for part in _parts(messages):
            needs.add(part)
        resolved = await self._resolve_all(needs, hold)
        return [_replace(message, resolved) for message in messages]

    async def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _resolve_all(self, needs: _Needs, hold: Callable[[int], None]) -> dict[str, bytes]:
        own_slots = asyncio.Semaphore(_MAX_AT_ONCE)

        async def resolve(source: str, name: str) -> bytes:
            def take(num_bytes: int) -> None:
                needs.take(num_bytes, source)
                hold(num_bytes)

            async with own_slots, self._slots:
                try:
                    data = await self._bring(source, take)
                except (FetchError, FileError) as error:
                    raise RequestError(f"{name}: {_shown(source)}: {error}") from None
                return check_bytes(data, name, self._policy.limits)

        tasks = {source: asyncio.create_task(resolve(source, name)) for source, name in needs.names.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:  # one has failed, or whoever asked has gone
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {source: task.result() for source, task in tasks.items()}

    async def _bring(self, source: str, take: Callable[[int], None]) -> bytes:
        max_bytes = self._policy.limits.max_bytes
        if _scheme(source) in ("http", "https"):
            return await self._fetcher.fetch(source, max_bytes, take)
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._readers, self._files.read, source, max_bytes)
        take(len(data))
        return data


class _Needs:
    """What has to be resolved for a request, and how much of it there may still be."""

    def __init__(self, limits: MediaLimits) -> None:
        self.names: dict[str, str] = {}  # of the item that needs a source first, by source
        self._limits = limits
        self._uses: Counter[str] = Counter()
        self._num_items: Counter[MediaKind] = Counter()
        self._num_frames = 0  # that come one by one
        self._total_bytes = 0

    def add(self, part: Mapping[str, Any]) -> None:
        """Counts the part if it is a medium, and notes what it needs."""
        found = source_of(part)
        if found is None:
            return
        kind, source, must_be_url = found
        self._num_items[kind] += 1
        name = f"{kind} {self._num_items[kind]}"
        check_count(self._num_items.total(), name, self._limits)
        if isinstance(source, str):
            self._count_frames(num_frames_of_url(source) if kind == "video" else 0, name)
            self._add_source(source, name, must_be_url)
        elif isinstance(source, list):
            self._count_frames(len(source), name)
            for index, frame in enumerate(source):
                if isinstance(frame, str):
                    self._add_source(frame, f"{name}, frame {index + 1}", must_be_url)

    def take(self, num_bytes: int, source: str) -> None:
        """Counts bytes that have come for a source, once for each part that uses it."""
        self._count(num_bytes * self._uses[source], self.names[source])

    def _add_source(self, source: str, name: str, must_be_url: bool) -> None:
        if _scheme(source) == "data":
            self._count(check_data_url(source, name, self._limits), name)
            return
        if len(source) > _MAX_SOURCE_LENGTH:
            raise RequestError(f"{name}: the URL has {len(source)} characters, the limit is {_MAX_SOURCE_LENGTH}")
        if must_be_url and not _scheme(source):
            raise RequestError(f"{name}: the URL begins with {source[:20]!r}, expected data:, http:, https: or file:")
        self.names.setdefault(source, name)
        self._uses[source] += 1

    def _count_frames(self, num_frames: int, name: str) -> None:
        self._num_frames += num_frames
        if self._num_frames > self._limits.max_frames:
            raise RequestError(f"{name}: {self._num_frames} frames, the limit is {self._limits.max_frames}")

    def _count(self, num_bytes: int, name: str) -> None:
        self._total_bytes += num_bytes
        check_total(self._total_bytes, name, self._limits)


def _parts(messages: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    """The parts of all messages; what has another form is left to those who read it."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping):
                yield part


def _replace(message: dict[str, Any], resolved: Mapping[str, bytes]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_replace_part(part, resolved) for part in message["content"]]}


def _replace_part(part: Any, resolved: Mapping[str, bytes]) -> Any:
    found = source_of(part) if isinstance(part, Mapping) else None
    if found is None:
        return part
    kind, source, _ = found
    if isinstance(source, list):
        data: Any = [resolved.get(frame, frame) if isinstance(frame, str) else frame for frame in source]
    elif isinstance(source, str) and source in resolved:
        data = resolved[source]
    else:
        return part
    return {**{key: value for key, value in part.items() if key != f"{kind}_url"}, "type": kind, kind: data}


def _scheme(source: str) -> str:
    """data, http, https or file, if it begins with one of them; a path begins with none."""
    scheme = source[:6].lower().partition(":")
    return scheme[0] if scheme[1] and scheme[0] in ("data", "http", "https", "file") else ""


def _shown(source: str) -> str:
    """The source for a message: without a user's name and password, printable, at most 100 characters."""
    scheme, separator, rest = source.partition("://")
    host, slash, path = rest.partition("/")
    text = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
    text = "".join(char if char.isprintable() else "?" for char in text[:101])
    return text if len(text) <= 100 else f"{text[:97]}..."
