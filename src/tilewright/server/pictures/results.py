"""Pictures and videos that were made, kept in memory for those who know their names, for a while and within bounds."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

RESULT_PATH = "/made/"  # of results that are given by URL; the name that follows cannot be guessed: it needs no API key
MAX_RESULT_BYTES = 512 * 2**20
KEEP_S = 3600.0


@dataclass(frozen=True)
class KeptResult:
    data: bytes
    media_type: str
    expires_s: float  # by the event loop's clock


class ResultStore:
    """Results by names that cannot be guessed. The oldest go when there are too many bytes, and each after a while."""

    def __init__(self, max_bytes: int = MAX_RESULT_BYTES, keep_s: float = KEEP_S) -> None:
        self._max_bytes = max_bytes
        self.keep_s = keep_s
        self._kept: dict[str, KeptResult] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self.size_bytes = 0

    def put(self, data: bytes, media_type: str) -> str:
        """The name of a result."""
        name = secrets.token_urlsafe(24)
        loop = asyncio.get_running_loop()
        self._kept[name] = KeptResult(data, media_type, loop.time() + self.keep_s)
        self.size_bytes += len(data)
        while self.size_bytes > self._max_bytes and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))
        self._set_timer()
        return name

    def get(self, name: str) -> KeptResult | None:
        return self._kept.get(name)

    def drop(self, name: str | None) -> None:
        if name is not None and (result := self._kept.pop(name, None)):
            self.size_bytes -= len(result.data)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kept.clear()
        self.size_bytes = 0

    def _set_timer(self) -> None:
        if self._timer is None and self._kept:
            first = next(iter(self._kept.values()))
            self._timer = asyncio.get_running_loop().call_at(first.expires_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for name in [name for name, result in self._kept.items() if result.expires_s <= now_s]:
            self.drop(name)
        self._set_timer()
