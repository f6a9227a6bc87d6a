"""A child process that computes for the server, and is restarted when it ends.

A slow client, a large body or a garbage collection in the server delays no step of it, and its crash does not end the
server. docs/server.md has the measurements.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tilewright.host.memory import smallest_limit
from tilewright.process.state import ActivityProbe, how_ended, is_stopped
from tilewright.server.link import wire
from tilewright.server.link.backend import EngineUnavailable

_log = logging.getLogger(__name__)

# Before a restart, where the process was not ready for STEADY_S; doubled each time it ends before it is ready.
FIRST_PAUSE_S = 0.5
STEADY_S = 10.0
LONGEST_PAUSE_S = 30.0
CLOSE_TIMEOUT_S = 10.0
# A process may be stopped for a moment, as a profiler does to look at it: what comes meanwhile waits.
MAX_STOPPED_S = 1.0


class EngineRefused(Exception):
    """The process cannot start with these options: no such model, not enough memory."""


class SupervisedProcess:
    """Runs `python -m module FD`, which gets `options` in its first message and answers with "ready" or "refused".

    What its other messages mean, and what becomes of requests when it ends, is up to the subclass.
    """

    def __init__(
        self,
        what: str,
        module: str,
        options: Mapping[str, Any],
        *,
        log_level: int = logging.WARNING,
        log_is_json: bool = False,
    ) -> None:
        self._what = what  # for errors: "engine"
        self._module = module
        self._first_message: dict[str, Any] = {
            "options": dict(options),
            "log_level": log_level,
            "log_is_json": log_is_json,
        }
        self._writer: asyncio.StreamWriter | None = None  # None: the process is not ready
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: ActivityProbe | None = None  # from when it was first seen to be stopped
        self._supervisor: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_refused = False  # the latest process said why it cannot start: its end is no news
        self._last_status: int | None = None  # of the process that ended last
        self.num_restarts = 0

    def on_ready(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes what the process says of itself when it is ready; returns options for one that takes its place."""
        raise NotImplementedError

    def on_message(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_end(self, how: str) -> None:
        """The process has ended; called each time, also by `close`."""
        raise NotImplementedError

    async def start(self) -> None:
        """Returns when the process is ready; EngineRefused, with the reason, if it cannot start."""
        ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(ready))
        await ready

    @property
    def is_ready(self) -> bool:
        return self._writer is not None

    async def close(self) -> None:
        """Ends the process; requests under way are dropped."""
        self._is_closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def send(self, message: Mapping[str, Any]) -> None:
        if self._writer is None:
            if self._is_closing:
                raise EngineUnavailable("the server is shutting down")
            raise EngineUnavailable(f"the {self._what} is starting; try again later")
        self._writer.writelines(wire.encode(message))

    def check_running(self) -> None:
        """EngineUnavailable if the process has been stopped for MAX_STOPPED_S (SIGSTOP, a debugger).

        What was sent to it before waits, and is computed when it goes on.
        """
        process = self._process
        if process is None or not is_stopped(process.pid):
            self._stopped = None
            return
        if self._stopped is None or self._stopped.pid != process.pid or self._stopped.used_s > 0:
            self._stopped = ActivityProbe(process.pid)
        if self._stopped.elapsed_s >= MAX_STOPPED_S:
            raise EngineUnavailable(f"the {self._what} (process {process.pid}) is stopped; try again later")

    async def _supervise(self, first_ready: asyncio.Future[None]) -> None:
        """Runs the process, and restarts it, until `close`."""
        pause_s = FIRST_PAUSE_S
        while True:
            ready_s: float | None = None
            try:
                ready_s = await self._run_one(first_ready)
            except EngineRefused as error:
                if not first_ready.done():
                    first_ready.set_exception(error)
                    return
                _log.error("the %s cannot be restarted: %s", self._what, error)
            except OSError as error:  # too many processes or open files; a later attempt may succeed
                _log.exception("the %s could not be started", self._what)
                if not first_ready.done():
                    reason = f"the {self._what}'s process could not be started: {error}"
                    first_ready.set_exception(EngineRefused(reason))
                    return
            if ready_s is None:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = 0.0 if ready_s >= STEADY_S else FIRST_PAUSE_S
            if not first_ready.done():
                reason = f"the {self._what}'s process ended before it was ready ({how_ended(self._last_status)})"
                if self._last_status == -signal.SIGKILL:
                    reason += f", as the system does when memory runs out: a process may have {smallest_limit()} here"
                first_ready.set_exception(EngineRefused(reason))
                return
            self.num_restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = max(pause_s, FIRST_PAUSE_S)

    async def _run_one(self, first_ready: asyncio.Future[None]) -> float | None:
        """Runs one process until it ends; returns for how many seconds it was ready, None if it never was."""
        self._is_refused = False
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", self._module, str(theirs.fileno())]
                files = [theirs.fileno()]
                process = self._process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        loop, began_s = asyncio.get_running_loop(), None
        try:
            writer.writelines(wire.encode(self._first_message))
            async for message in _messages(reader):
                if "ready" in message:
                    self._writer, began_s = writer, loop.time()
                    self._first_message["options"].update(self.on_ready(message))
                    if not first_ready.done():
                        first_ready.set_result(None)
                elif "refused" in message:
                    self._is_refused = True
                    raise EngineRefused(message["refused"])
                else:
                    self.on_message(message)
        finally:
            self._writer = None
            writer.close()
            try:
                await _end(process, at_once=not self._is_closing or is_stopped(process.pid))
            finally:
                self._process, self._last_status = None, process.returncode
                self.on_end(how_ended(process.returncode))
        return None if began_s is None else loop.time() - began_s


async def _messages(reader: asyncio.StreamReader) -> Any:
    """The messages of the process until it closes the socket."""
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
