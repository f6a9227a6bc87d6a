"""Replaces the media of a request by their bytes before the engine gets it: the engine process opens no URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.inputs.media import MediaLimits, check_bytes
from tilewright.server.http.admission import ReserveMemory
from tilewright.server.media.fetch import MAX_CONNECTIONS, Fetcher, FetchError
from tilewright.server.media.sources import (
    FileError,
    FolderReader,
    MediaSource,
    MediaSources,
    decode_data_url,
    decode_frames_url,
    filled,
    scheme_of,
)
from tilewright.types import RequestError

_MAX_AT_ONCE = 8  # URLs and files per request
_NUM_READERS = 4  # threads that read files and decode data: URLs
_MAX_DECODED_HERE = 1 << 16  # characters of a data: URL: 0.7 ms of the event loop; a thread would cost 0.1 ms


@dataclass(frozen=True)
class MediaPolicy:
    """Limits on the media of requests, and where they may come from."""

    limits: MediaLimits = field(default_factory=MediaLimits)
    allow_private_addresses: bool = False
    folders: tuple[Path, ...] = ()  # folders with files that requests may name; empty: none
    timeout_s: float = 30.0  # for one item, redirects included
    max_redirects: int = 3


class MediaGate:
    """Replaces the URLs and paths of requests by their bytes, for many requests concurrently."""

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
        """Return the messages with the bytes of each medium in place of its URL or path.

        `hold` is called with a number of bytes before they are stored, and may raise; at the end with the negative size
        of the data: URLs, which the caller has to drop together with `messages`.
        RequestError names the item that is too large, one too many, not allowed or not readable.
        """
        sources = MediaSources(self._policy.limits)
        planned = [sources.plan(message) for message in messages]
        await self._resolve_all(sources, hold)
        hold(-sum(len(source.text) for source in sources if source.scheme == "data"))
        return [filled(message) for message in planned]

    async def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _resolve_all(self, sources: MediaSources, hold: ReserveMemory) -> None:
        own_slots = asyncio.Semaphore(_MAX_AT_ONCE)

        async def resolve(source: MediaSource) -> None:
            def take(num_bytes: int) -> None:
                sources.grow(source, num_bytes)
                hold(num_bytes)

            if source.scheme == "data":
                hold(source.size_bytes)
                source.data = await self._decode(source)
                take(_size(source.data) - source.size_bytes)
                return
            async with own_slots, self._slots:
                try:
                    data = await self._read(source.text, take)
                except (FetchError, FileError) as error:
                    raise RequestError(f"{source.name}: {_shown(source.text)}: {error}") from None
                source.data = check_bytes(data, source.name, self._policy.limits)

        tasks = [asyncio.create_task(resolve(source)) for source in sources]
        try:
            await asyncio.gather(*tasks)
        finally:  # one has failed, or the client has left
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, source: MediaSource) -> bytes | list[bytes]:
        decode = decode_frames_url if source.is_frames else decode_data_url
        if len(source.text) <= _MAX_DECODED_HERE:
            return decode(source.text, source.name, self._policy.limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, decode, source.text, source.name, self._policy.limits)

    async def _read(self, source: str, take: ReserveMemory) -> bytes:
        max_bytes = self._policy.limits.max_bytes
        if scheme_of(source) in ("http", "https"):
            return await self._fetcher.fetch(source, max_bytes, take)
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._readers, self._files.read, source, max_bytes)
        take(len(data))
        return data


def _size(data: bytes | list[bytes]) -> int:
    return len(data) if isinstance(data, bytes) else sum(map(len, data))


def _shown(source: str) -> str:
    """Return the source for a message: without user name and password, printable, at most 100 characters."""
    scheme, separator, rest = source.partition("://")
    host, slash, path = rest.partition("/")
    text = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
    text = "".join(char if char.isprintable() else "?" for char in text[:101])
    return text if len(text) <= 100 else f"{text[:97]}..."
