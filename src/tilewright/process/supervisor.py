"""A child process that computes for the server and is restarted when it ends.

Slow clients, large bodies or garbage collections in the server do not delay its steps, and its crash does not end the
server. docs/server.md has measurements.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from typing import Any

from tilewright.host.memory import smallest_limit
from tilewright.process import frames
from tilewright.process.child import Child
from tilewright.process.log import TEXT, LogSettings
from tilewright.process.state import ActivityProbe, how_ended, is_stopped
from tilewright.types import EngineUnavailable

_log = logging.getLogger(__name__)

# Pause before a restart if the process was ready for less than STEADY_S; doubled each time it ends before it is ready.
FIRST_PAUSE_S = 0.5
STEADY_S = 10.0
LONGEST_PAUSE_S = 30.0
CLOSE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 1.0  # for a process that has closed its channel
# A process may be stopped briefly, for example by a profiler: requests wait meanwhile.
MAX_STOPPED_S = 1.0


class ProcessRefused(Exception):
    """The process cannot start with these options, for example for lack of memory. The message is the reason."""


class SupervisedProcess:
    """Runs `entry` with `options`, which first sends "ready" or "refused", and restarts it until `close`.

    Subclasses handle its other messages, and requests that run when it ends.
    """

    def __init__(self, what: str, entry: str, options: Mapping[str, Any], log: LogSettings = TEXT) -> None:
        self._what = what  # for errors: "engine"
        self._entry = entry
        self._options = dict(options)
        self._log = log
        self._writer: asyncio.StreamWriter | None = None  # None: the process is not ready
        self._process: Child | None = None
        self._stopped: ActivityProbe | None = None  # since the process was first seen stopped
        self._supervisor: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_refused = False  # the latest process has reported why it cannot start: its end is not logged
        self._last_status: int | None = None  # of the process that ended last
        self.num_restarts = 0

    def on_ready(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle the message that the process is ready; return options to add for later restarts."""
        raise NotImplementedError

    def on_message(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def on_end(self, how: str) -> None:
        """Handle the end of a process; called each time, also after `close`."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process and wait until it is ready; raise ProcessRefused, with the reason, if it cannot start."""
        ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(ready))
        await ready

    @property
    def is_ready(self) -> bool:
        return self._writer is not None

    async def close(self) -> None:
        """End the process; running requests are dropped."""
        self._is_closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def send(self, message: Mapping[str, Any]) -> None:
        if self._writer is None:
            if self._is_closing:
                raise EngineUnavailable("the server is shutting down")
            raise EngineUnavailable(f"the {self._what} is starting; try again later")
        self._writer.writelines(frames.encode(message))

    def check_running(self) -> None:
        """Raise EngineUnavailable if the process has been stopped for MAX_STOPPED_S (SIGSTOP, a debugger).

        Requests that were sent before are computed when it continues.
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
        """Run the process, and restart it, until `close`."""
        pause_s = FIRST_PAUSE_S
        while True:
            ready_s: float | None = None
            try:
                ready_s = await self._run_one(first_ready)
            except ProcessRefused as error:
                if not first_ready.done():
                    first_ready.set_exception(error)
                    return
                _log.error("the %s cannot be restarted: %s", self._what, error)
            except OSError as error:  # too many processes or open files; a later attempt may succeed
                _log.exception("the %s could not be started", self._what)
                if not first_ready.done():
                    reason = f"the {self._what}'s process could not be started: {error}"
                    first_ready.set_exception(ProcessRefused(reason))
                    return
            if ready_s is None:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = 0.0 if ready_s >= STEADY_S else FIRST_PAUSE_S
            if not first_ready.done():
                reason = f"the {self._what}'s process ended before it was ready ({how_ended(self._last_status)})"
                if self._last_status == -signal.SIGKILL:
                    reason += f", as the system does when memory runs out: a process may have {smallest_limit()} here"
                first_ready.set_exception(ProcessRefused(reason))
                return
            self.num_restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = max(pause_s, FIRST_PAUSE_S)

    async def _run_one(self, first_ready: asyncio.Future[None]) -> float | None:
        """Run one process until it ends; return the seconds that it was ready, None if it never was."""
        self._is_refused = False
        arguments = {"options": self._options}
        process = self._process = Child(self._entry, arguments, has_own_session=False, log=self._log)
        reader, writer = await asyncio.open_connection(sock=process.channel.connection)
        loop, began_s = asyncio.get_running_loop(), None
        try:
            while (message := await _read_message(reader)) is not None:
                if "ready" in message:
                    self._writer, began_s = writer, loop.time()
                    self._options.update(self.on_ready(message))
                    if not first_ready.done():
                        first_ready.set_result(None)
                elif "refused" in message:
                    self._is_refused = True
                    raise ProcessRefused(message["refused"])
                else:
                    self.on_message(message)
        finally:
            self._writer = None
            writer.close()
            is_asked = self._is_closing and not is_stopped(process.pid)
            try:
                await loop.run_in_executor(None, process.finish, CLOSE_TIMEOUT_S if is_asked else EXIT_TIMEOUT_S)
            except asyncio.CancelledError:  # `close` while waiting for an ended process
                process.kill()
                raise
            finally:
                self._process, self._last_status = None, process.status
                self.on_end(how_ended(self._last_status))
        return None if began_s is None else loop.time() - began_s


async def _read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message of the process; None when it has closed its end."""
    reading = frames.decode()
    wanted = next(reading)
    try:
        while True:
            wanted = reading.send(await reader.readexactly(wanted))
    except StopIteration as end:
        message: dict[str, Any] = end.value
        return message
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
