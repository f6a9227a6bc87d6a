"""The engine in a child process, which is restarted when it ends."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from tilewright.inputs.text_limits import TextLimits
from tilewright.server.link import wire
from tilewright.server.link.backend import Abort, EngineRequest, EngineUnavailable, Failed, Listener, ModelInfo
from tilewright.server.link.local import deliver
from tilewright.server.link.supervisor import SupervisedProcess
from tilewright.types import RequestError

_log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0


class RemoteBackend(SupervisedProcess):
    """A Backend whose Engine, made with `options`, runs in a child process."""

    def __init__(
        self, options: Mapping[str, Any], *, log_level: int = logging.WARNING, log_is_json: bool = False
    ) -> None:
        module = "tilewright.server.link.engine_process"
        super().__init__("engine", module, options, log_level=log_level, log_is_json=log_is_json)
        self._listeners: dict[str, Listener] = {}
        self._stats: dict[str, asyncio.Future[Mapping[str, float]]] = {}
        self._model: ModelInfo | None = None

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineUnavailable("the model is loading; try again later")
        return self._model

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        request_id = uuid.uuid4().hex
        try:
            self.send({"submit": request_id, "request": wire.request_to_json(request)})
        except RecursionError:
            raise RequestError("the request has values that are nested too deeply") from None
        self._listeners[request_id] = listener
        return lambda: self._abort(request_id)

    async def stats(self) -> Mapping[str, float]:
        query = uuid.uuid4().hex
        found = self._stats[query] = asyncio.get_running_loop().create_future()
        try:
            self.send({"stats": query})
            return await asyncio.wait_for(found, STATS_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise EngineUnavailable(f"the engine did not respond for {STATS_TIMEOUT_S:g} s") from error
        finally:
            del self._stats[query]

    def on_ready(self, about: Mapping[str, Any]) -> None:
        self._model = ModelInfo(**{**about, "text_limits": TextLimits(**about["text_limits"])})

    def on_message(self, message: dict[str, Any]) -> None:
        if "events" in message:
            deliver(self._listeners, [(key, wire.event_from_json(event)) for key, event in message["events"]])
        elif (waiting := self._stats.get(message["stats"])) and not waiting.done():
            waiting.set_result(message["values"])

    def on_end(self, how: str) -> None:
        """Fails all requests under way."""
        if not self._is_closing:
            _log.error("the engine ended (%s) with %d requests under way", how, len(self._listeners))
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(Failed("unavailable", f"the engine ended ({how}) and is being restarted; send the request again"))
        for waiting in self._stats.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(f"the engine ended ({how})"))

    def _abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) and self.is_ready:
            self.send({"abort": request_id})
