"""Backends: an engine in a child process that is restarted when it ends, or in this process (`tilewright batch`)."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilewright.inputs.messages import TextLimits
from tilewright.process.log import TEXT, LogSettings
from tilewright.process.state import ActivityProbe
from tilewright.process.supervisor import SupervisedProcess
from tilewright.server.link.backend import (
    SERVER_ENDING,
    SHUTTING_DOWN,
    Abort,
    Ended,
    EngineRequest,
    Failed,
    Listener,
    ModelInfo,
    event_from_json,
    request_to_json,
)
from tilewright.server.link.service import KNOWN_LIMITS, EngineService, Outbox, Post
from tilewright.types import EngineUnavailable, RequestError

if TYPE_CHECKING:
    from tilewright.engine.engine import Engine


class LocalBackend:
    """A Backend with an Engine in this process, which the caller closes. `limits` are EngineService's."""

    num_restarts = 0  # a crash of the engine ends this process

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
    """Call the listeners of the events' requests, and remove the listeners of requests that end."""
    for request_id, event in post:
        is_last = isinstance(event, Ended | Failed)
        listener = listeners.pop(request_id, None) if is_last else listeners.get(request_id)
        if listener is not None:
            listener(event)


_log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.5  # /health has to answer within 2 s; the engine's receiving thread computes nothing itself


class RemoteBackend(SupervisedProcess):
    """A Backend whose Engine, made with `options`, runs in a child process."""

    def __init__(self, options: Mapping[str, Any], log: LogSettings = TEXT) -> None:
        super().__init__("engine", "tilewright.server.link.service:serve", options, log)
        self._listeners: dict[str, Listener] = {}
        self._stats: dict[str, asyncio.Future[Mapping[str, float]]] = {}
        self._model: ModelInfo | None = None
        self._last_stats: Mapping[str, float] = {}
        self._silent_since_s: float | None = None  # the first unanswered query since the last answer

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineUnavailable("the model is loading; try again later")
        return self._model

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        self.check_running()
        request_id = uuid.uuid4().hex
        try:
            self.send({"submit": request_id, "request": request_to_json(request)})
        except RecursionError:
            raise RequestError("the request has values that are nested too deeply") from None
        self._listeners[request_id] = listener
        return lambda: self._abort(request_id)

    async def stats(self) -> Mapping[str, float]:
        """Return the engine's stats; the last known ones if it is too busy to answer.

        Raise EngineUnavailable if it neither responds nor computes: it is stopped, or swapped out.
        """
        self.check_running()
        loop, query = asyncio.get_running_loop(), uuid.uuid4().hex
        found = self._stats[query] = loop.create_future()
        asked_s, process = loop.time(), self._process
        probe = None if process is None else ActivityProbe(process.pid)
        try:
            self.send({"stats": query})
            self._last_stats = await asyncio.wait_for(found, STATS_TIMEOUT_S)
            self._silent_since_s = None
        except asyncio.TimeoutError as error:
            if probe is None or not probe.is_computing():
                raise EngineUnavailable(f"the engine did not respond for {STATS_TIMEOUT_S:g} s") from error
            self._silent_since_s = asked_s if self._silent_since_s is None else self._silent_since_s
            silent_s = loop.time() - self._silent_since_s
            return {**self._last_stats, "step_age_s": max(silent_s, self._last_stats["step_age_s"])}
        finally:
            del self._stats[query]
        return self._last_stats

    def on_ready(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        about = message["ready"]
        self._last_stats, self._silent_since_s = {"step_age_s": 0.0, "num_replicas": 1}, None
        self._model = ModelInfo(**{**about, "text_limits": TextLimits(**about["text_limits"])})
        return {KNOWN_LIMITS: message[KNOWN_LIMITS]}

    def on_message(self, message: dict[str, Any]) -> None:
        if "events" in message:
            deliver(self._listeners, [(key, event_from_json(event)) for key, event in message["events"]])
        elif (waiting := self._stats.get(message["stats"])) and not waiting.done():
            waiting.set_result(message["values"])

    def on_end(self, how: str) -> None:
        """Fail all running requests."""
        if not (self._is_closing or self._is_refused):
            _log.error("the engine ended (%s) with %d running requests", how, len(self._listeners))
        failed = Failed("unavailable", f"the engine ended ({how}) and is being restarted; send the request again")
        if self._is_closing:
            failed = Failed("unavailable", SHUTTING_DOWN, code=SERVER_ENDING)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(failed)
        for waiting in self._stats.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(f"the engine ended ({how})"))

    def _abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) and self.is_ready:
            self.send({"abort": request_id})
