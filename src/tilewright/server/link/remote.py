"""The engine in a child process, which is restarted when it ends.

A slow client, a large body or a garbage collection in the server delays no step of the engine, and a crash of the
engine does not end the server. docs/server.md has the measurements.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from tilewright.inputs.text_limits import TextLimits
from tilewright.server.link import wire
from tilewright.server.link.backend import Abort, EngineRequest, EngineUnavailable, Failed, Listener, ModelInfo
from tilewright.server.link.local import deliver
from tilewright.types import RequestError

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5  # before a restart; doubled each time the engine ends before it is ready
LONGEST_PAUSE_S = 30.0
STATS_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0


class EngineRefused(Exception):
    """The engine cannot start with these options: no such model, not enough memory."""


class RemoteBackend:
    """A Backend whose Engine, made with `options`, runs in a child process."""

    def __init__(
        self, options: Mapping[str, Any], *, log_level: int = logging.WARNING, log_is_json: bool = False
    ) -> None:
        self._first_message = {"engine": dict(options), "log_level": log_level, "log_is_json": log_is_json}
        self._listeners: dict[str, Listener] = {}
        self._stats: dict[str, asyncio.Future[Mapping[str, float]]] = {}
        self._model: ModelInfo | None = None
        self._writer: asyncio.StreamWriter | None = None  # None: the engine is not ready
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_closing = False
        self.num_restarts = 0

    async def start(self) -> None:
        """Returns when the engine is ready; EngineRefused, with the reason, if it cannot start."""
        ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(ready))
        await ready

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineUnavailable("the model is loading; try again later")
        return self._model

    @property
    def is_ready(self) -> bool:
        return self._writer is not None

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        request_id = uuid.uuid4().hex
        try:
            self._send({"submit": request_id, "request": wire.request_to_json(request)})
        except RecursionError:
            raise RequestError("the request has values that are nested too deeply") from None
        self._listeners[request_id] = listener
        return lambda: self._abort(request_id)

    async def stats(self) -> Mapping[str, float]:
        query = uuid.uuid4().hex
        found = self._stats[query] = asyncio.get_running_loop().create_future()
        try:
            self._send({"stats": query})
            return await asyncio.wait_for(found, STATS_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise EngineUnavailable(f"the engine did not respond for {STATS_TIMEOUT_S:g} s") from error
        finally:
            del self._stats[query]

    async def close(self) -> None:
        """Ends the engine; requests under way are dropped."""
        self._is_closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is None:
            raise EngineUnavailable("the engine is starting; try again later")
        self._writer.writelines(wire.encode(message))

    def _abort(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) and self._writer is not None:
            self._send({"abort": request_id})

    async def _supervise(self, first_ready: asyncio.Future[None]) -> None:
        """Runs the engine, and restarts it, until `close`."""
        pause_s = FIRST_PAUSE_S
        while True:
            was_ready = False
            try:
                was_ready = await self._run_one(first_ready)
            except EngineRefused as error:
                if not first_ready.done():
                    first_ready.set_exception(error)
                    return
                _log.error("the engine cannot be restarted: %s", error)
            except OSError as error:  # too many processes or open files; a later attempt may succeed
                _log.exception("the engine could not be started")
                if not first_ready.done():
                    first_ready.set_exception(EngineRefused(f"the engine's process could not be started: {error}"))
                    return
            pause_s = FIRST_PAUSE_S if was_ready else min(2 * pause_s, LONGEST_PAUSE_S)
            if not first_ready.done():
                first_ready.set_exception(EngineRefused("the engine's process ended before it was ready"))
                return
            self.num_restarts += 1
            await asyncio.sleep(pause_s)

    async def _run_one(self, first_ready: asyncio.Future[None]) -> bool:
        """Runs one engine process until it ends; returns whether it ever was ready."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", "tilewright.server.link.engine_process", str(theirs.fileno())]
                files = [theirs.fileno()]
                process = self._process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        was_ready = False
        try:
            writer.writelines(wire.encode(self._first_message))
            async for message in _messages(reader):
                if "events" in message:
                    deliver(self._listeners, [(key, wire.event_from_json(event)) for key, event in message["events"]])
                elif "stats" in message:
                    if (waiting := self._stats.get(message["stats"])) and not waiting.done():
                        waiting.set_result(message["values"])
                elif "ready" in message:
                    self._model, self._writer, was_ready = _model_info(message["ready"]), writer, True
                    if not first_ready.done():
                        first_ready.set_result(None)
                else:
                    raise EngineRefused(message["refused"])
        finally:
            self._writer = None
            writer.close()
            try:
                await _end(process, at_once=not self._is_closing)
            finally:
                self._process = None
                self._fail_all(process.returncode)
        return was_ready

    def _fail_all(self, status: int | None) -> None:
        """Fails all requests under way: their engine has ended."""
        how = f"status {status}" if status is None or status >= 0 else _signal_name(-status)
        if not self._is_closing:
            _log.error("the engine ended (%s) with %d requests under way", how, len(self._listeners))
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(Failed("unavailable", f"the engine ended ({how}) and is being restarted; send the request again"))
        for waiting in self._stats.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(f"the engine ended ({how})"))


def _model_info(fields: Mapping[str, Any]) -> ModelInfo:
    return ModelInfo(**{**fields, "text_limits": TextLimits(**fields["text_limits"])})


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return f"signal {known.get(number, number)}"


async def _messages(reader: asyncio.StreamReader) -> Any:
    """The messages of the engine until it closes the socket."""
    while True:
        try:
            (text_bytes,) = wire.HEAD.unpack(await reader.readexactly(wire.HEAD.size))
            envelope = wire.decode(await reader.readexactly(text_bytes))
            blobs = [await reader.readexactly(size) for size in envelope.sizes]
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        yield envelope.fill(blobs)


async def _end(process: subprocess.Popen[bytes], *, at_once: bool) -> None:
    """Waits until a process whose socket was closed has ended, and kills one that does not."""
    loop = asyncio.get_running_loop()
    try:
        await loop.run_in_executor(None, process.wait, 1.0 if at_once else CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        await loop.run_in_executor(None, process.wait)
    except asyncio.CancelledError:  # `close` while an ended process is waited for
        process.kill()
        process.wait()
        raise
