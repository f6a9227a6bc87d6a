"""The server's side of the diffusion worker: its queue, and its process, which the first request starts."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.diffusion.params import Limits
from tilewright.diffusion.requests import (
    DiffusionRequest,
    Expectation,
    Progress,
    State,
    progress_from_json,
    request_to_json,
)
from tilewright.process.log import TEXT, LogSettings
from tilewright.process.supervisor import ProcessRefused, SupervisedProcess
from tilewright.server.http.admission import MAX_WAIT_S
from tilewright.server.http.errors import ApiError

_log = logging.getLogger(__name__)

ProgressListener = Callable[[Progress], None]  # called on the event loop
Cancel = Callable[[], None]  # cancels a request within a step; no effect if it has ended
ENTRY = "tilewright.server.link.diffusion_process:open_diffusion"  # opens the model, in the process
NICENESS = 10  # the engine gets nine tenths of a core that both want
_FIRST_GUESS_S = 30.0  # expected time of a request before the first has run
_SMOOTHING = 0.2
_NOT_STARTED = "the diffusion worker cannot be started; the server's log has the reason"


@dataclass(eq=False)
class _Job:
    request_id: str
    request: DiffusionRequest
    listener: ProgressListener | None  # None: cancelled
    expected_s: float | None = None  # from its start; None: unknown


class DiffusionBackend(SupervisedProcess):
    """Runs diffusion in a process of its own, one request at a time in order of arrival.

    `max_queue` requests may wait, more are refused with 429.

    Its process has a niceness `niceness` above this one's and `num_threads` threads, one per CPU if None. The first
    request starts it and loads the model. When it dies, its running request ends with an error; a new process
    makes the waiting ones.
    """

    def __init__(
        self,
        name: str,
        model: Mapping[str, Any],
        media_limits: Mapping[str, Any],
        *,
        max_queue: int = 16,
        entry: str = ENTRY,
        niceness: int = NICENESS,
        num_threads: int | None = None,
        log: LogSettings = TEXT,
    ) -> None:
        options: dict[str, Any] = {"entry": entry, "model": dict(model)}
        options |= {"media_limits": dict(media_limits), "niceness": niceness, "num_threads": num_threads}
        super().__init__("diffusion worker", "tilewright.server.link.diffusion_process:serve", options, log)
        self.name = name
        self.limits: Limits | None = None  # known once the process has started
        self._max_queue = max_queue
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._starting: asyncio.Task[None] | None = None
        self._was_ready = False  # the current process
        self._waiting_for_limits: list[asyncio.Future[None]] = []
        self._expecting: dict[str, asyncio.Future[Expectation | None]] = {}
        self._mean_s = _FIRST_GUESS_S
        self._began_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    def stats(self) -> dict[str, float]:
        """Return the stats for /metrics."""
        counts = {"num_waiting": self.num_waiting, "num_running": self.num_running, "is_ready": self.is_ready}
        return {**counts, "num_restarts": self.num_restarts}

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is no process."""
        return None if self._process is None else self._process.pid

    async def wait_for_limits(self) -> None:
        """Wait until the limits are known; the first call starts the process. Raise a 503 if it cannot be started."""
        if self.limits is not None:
            return
        self._start_once()
        known = asyncio.get_running_loop().create_future()
        self._waiting_for_limits.append(known)
        await known

    def check(self, request: DiffusionRequest) -> None:
        """Raise RequestError for a request that the model does not support. Before its limits are known, do nothing."""
        if self.limits is not None:
            request.params(self.limits, request.image)

    def check_room(self) -> None:
        """Raise a 429 if the queue is full, EngineUnavailable if the process is stopped."""
        self.check_running()
        if len(self._queue) < self._max_queue or (not self._queue and self._running is None):
            return
        wait_s = min(MAX_WAIT_S, max(1, math.ceil(self._mean_s)))
        num_waiting, limit = len(self._queue), self._max_queue
        message = f"{num_waiting} requests wait for the image model, the limit is {limit}; try again in {wait_s} s"
        headers = {"Retry-After": str(wait_s)}
        raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)

    async def expect(self, request: DiffusionRequest, allowed_s: float | None = None) -> Expectation | None:
        """Return the expected time of a request from its start; None if the process is not ready.

        With `allowed_s`, raise ApiError if it takes longer: 400 for the request alone, 429 together with the queue.
        """
        self.check_room()  # also raises if the process is stopped
        if not self.is_ready:
            return None
        name = uuid.uuid4().hex
        coming = self._expecting[name] = asyncio.get_running_loop().create_future()
        try:
            self.send({"expect": name, "request": request_to_json(request), "allowed_s": allowed_s})
            found = await coming
        finally:
            del self._expecting[name]
        if found is not None and allowed_s is not None:
            self._check_time(found, allowed_s)
        return found

    def _check_time(self, found: Expectation, allowed_s: float) -> None:
        given = f"the {allowed_s:g} s that this server allows a request (--request-timeout)"
        if found.seconds > allowed_s:
            others = " or ".join(found.sizes_in_time)
            message = (
                f"size: {found.size} takes about {found.seconds:.0f} s here ({found.basis}), longer than {given}; "
                + (f"the largest that fit are {others}" if others else "no size fits: ask for fewer steps or images")
            )
            raise ApiError(400, message, param="size", code="takes_too_long")
        before_s = self._before_s()
        if before_s + found.seconds > allowed_s:
            wait_s = min(MAX_WAIT_S, math.ceil(before_s + found.seconds - allowed_s))
            message = (
                f"requests before this one take about {before_s:.0f} s, and it takes about {found.seconds:.0f} s, "
                f"together longer than {given}; try again in {wait_s} s"
            )
            headers = {"Retry-After": str(wait_s)}
            raise ApiError(429, message, kind="rate_limit_error", code="queue_too_long", headers=headers)

    def _before_s(self) -> float:
        """Return the expected seconds of the queue and of the rest of the running request."""
        waiting_s = sum(self._mean_s if job.expected_s is None else job.expected_s for job in self._queue)
        running = self._running
        if running is None or running.expected_s is None:
            return waiting_s
        elapsed_s = asyncio.get_running_loop().time() - self._began_s
        return waiting_s + max(0.0, running.expected_s - elapsed_s)

    def submit(self, request: DiffusionRequest, listener: ProgressListener, expected_s: float | None = None) -> Cancel:
        """Put a request into the queue; its progress goes to the listener, the first before this method returns.

        `expected_s` is its expected time, if known: the waiting time of later requests depends on it.
        """
        self.check_room()
        job = _Job(uuid.uuid4().hex, request, listener, expected_s)
        self._queue.append(job)
        self._tell_places()
        self._start_once()
        self._next()
        return lambda: self._cancel(job)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._tell_limits(_NOT_STARTED)
        await super().close()

    def _start_once(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self.start()
        except ProcessRefused as error:
            _log.error("the image model cannot be loaded: %s", error)
            self._supervisor = self._starting = None  # the next request tries again
            self._fail_waiting()

    def on_ready(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        self.limits = Limits(**message["ready"]["limits"])
        self._was_ready = True
        self._tell_limits()
        self._next()
        return {}

    def on_message(self, message: dict[str, Any]) -> None:
        if "expected" in message:
            coming = self._expecting.get(message["expected"])
            if coming is not None and not coming.done():  # the caller still waits
                about = message["expectation"]
                coming.set_result(None if about is None else Expectation(**about))
            return
        job, progress = self._running, progress_from_json(message["progress"])
        if job is None or job.request_id != message["request"]:
            return
        if progress.is_last:
            self._running = None
        if progress.state is State.COMPLETED:
            took_s = asyncio.get_running_loop().time() - self._began_s
            self._mean_s += _SMOOTHING * (took_s - self._mean_s)
        _tell(job, progress)
        if progress.is_last:
            self._next()

    def on_end(self, how: str) -> None:
        was_ready, self._was_ready = self._was_ready, False
        for coming in self._expecting.values():
            if not coming.done():
                coming.set_result(None)
        job, self._running = self._running, None
        if not (self._is_closing or self._is_refused):
            _log.error("the diffusion worker ended (%s)%s", how, " during a request" if job else "")
        if job is not None:
            message = f"the diffusion worker ended ({how}) and is being restarted; send the request again"
            if self._is_closing:
                message = "the server is shutting down before the request is run"
            _tell(job, Progress.failed("unavailable", message))
        if not was_ready or self._is_closing:
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        jobs, self._queue = self._queue, deque()
        message = "the server is shutting down before the request is run" if self._is_closing else _NOT_STARTED
        for job in jobs:
            _tell(job, Progress.failed("unavailable", message))
        self._tell_limits(_NOT_STARTED)

    def _tell_limits(self, failure: str | None = None) -> None:
        waiting, self._waiting_for_limits = self._waiting_for_limits, []
        for known in (known for known in waiting if not known.done()):
            if failure is None:
                known.set_result(None)
            else:
                known.set_exception(ApiError(503, failure, kind="server_error", code="engine_unavailable"))

    def _next(self) -> None:
        if self._running is not None or not self._queue or not self.is_ready:
            return
        job = self._running = self._queue.popleft()
        self._began_s = asyncio.get_running_loop().time()
        self.send({"make": job.request_id, "request": request_to_json(job.request)})
        self._tell_places()

    def _tell_places(self) -> None:
        for place, job in enumerate(self._queue):
            _tell(job, Progress(State.QUEUED, num_before=place + self.num_running))

    def _cancel(self, job: _Job) -> None:
        job.listener = None
        if job in self._queue:
            self._queue.remove(job)
            self._tell_places()
        elif job is self._running and self.is_ready:
            self.send({"cancel": job.request_id})


def _tell(job: _Job, progress: Progress) -> None:
    if job.listener is not None:
        job.listener(progress)
