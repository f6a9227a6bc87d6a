"""An engine in the server's own process: for `tilewright batch` and tests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilewright.server.link.backend import Abort, Ended, EngineRequest, Failed, Listener, ModelInfo
from tilewright.server.link.outbox import Outbox, Post
from tilewright.server.link.service import EngineService

if TYPE_CHECKING:
    from tilewright.engine.engine import Engine


class LocalBackend:
    """A Backend over an Engine that the caller closes. `limits` are those of `EngineService`."""

    num_restarts = 0  # a crash ends this process too

    def __init__(self, engine: Engine, limits: tuple[float, float] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(lambda post: self._loop.call_soon_threadsafe(self._deliver, post))
        engine.loop.after_step = self._outbox.flush
        self._service = EngineService(engine, self._outbox.put, limits)
        self._listeners: dict[str, Listener] = {}

    @property
    def model(self) -> ModelInfo:
        return self._service.model()

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        request_id = uuid.uuid4().hex
        self._listeners[request_id] = listener
        self._service.submit(request_id, request)
        self._outbox.flush()
        return lambda: self._abort(request_id)

    async def stats(self) -> Mapping[str, float]:
        return self._service.stats()

    async def close(self) -> None:
        pass

    def _abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None):
            self._service.abort(request_id)

    def _deliver(self, post: Post) -> None:
        deliver(self._listeners, post)


def deliver(listeners: dict[str, Listener], post: Post) -> None:
    """Calls the listeners of the events' requests, and removes those of requests that end."""
    for request_id, event in post:
        is_last = isinstance(event, Ended | Failed)
        listener = listeners.pop(request_id, None) if is_last else listeners.get(request_id)
        if listener is not None:
            listener(event)
