"""Starts, watches and ends processes that need each other, such as the ranks of a group.

    workers = Workers("package.module:function", [WorkerSpec(rank=1, payload={...}, binding=...)], size=2,
                      on_death=lambda rank, reason: ...)
    ...
    workers.close()

A worker ends when this process ends for any reason, and when another worker dies. This module does not know what they
compute or how they communicate.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tilewright import config
from tilewright.host.binding import RankBinding
from tilewright.process.child import Child
from tilewright.process.frames import Channel
from tilewright.process.log import LogSettings
from tilewright.process.state import cause_of_end

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_EXIT_S = 1.0  # from the end of the channel to the end of the process, which unmaps a model's weights
_NUM_LAST_LINES = 20  # lines of standard error in the reason of a death: the end of a traceback
_MAX_LINE_BYTES = 8192  # longer ones are passed on in pieces

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """The arguments of one worker. `payload` is JSON; `fds` are inherited under the same numbers."""

    rank: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    fds: Sequence[int] = ()
    binding: RankBinding | None = None


class Workers:
    """Processes that run `entry`(channel, rank, size, payload, fds), until `close` or until one of them dies.

    `on_death` is called once, from another thread, with the rank and the reason, before the others are ended. A worker
    may not return before `close`, unless `may_finish`. `log_level` is that of Tilewright's log in the workers, whose
    standard output and error are passed on to standard error with the prefix "rank 1: ".
    """

    def __init__(
        self,
        entry: str,
        specs: Sequence[WorkerSpec],
        size: int,
        *,
        on_death: Callable[[int, str], None] | None = None,
        may_finish: bool = False,
        log_level: int = logging.WARNING,
        grace_s: float = GRACE_S,
    ) -> None:
        self._on_death = on_death
        self._may_finish = may_finish
        self._grace_s = grace_s
        self._log = LogSettings("plain", log_level)
        self._lock = threading.Lock()
        self._running: list[_Worker] = []
        self._is_closing = False
        self.pids: dict[int, int] = {}  # by rank
        self.channels: dict[int, Channel] = {}  # by rank; open until `close`
        started: Future[None] = Future()
        self._wakening, closing_end = os.pipe()
        self._closing_end: int | None = closing_end  # closing it wakes the thread
        self._thread = threading.Thread(
            target=self._run, args=(entry, specs, size, started), name="workers", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of all workers; return False if some still run after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End all workers and wait for their end; within `on_death` do not wait: they end after it returns."""
        self._is_closing = True
        with self._lock:
            if self._closing_end is not None:
                os.close(self._closing_end)
                self._closing_end = None
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for channel in self.channels.values():
                channel.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, entry: str, specs: Sequence[WorkerSpec], size: int, started: Future[None]) -> None:
        """Start the workers and watch them. One thread does both, since PR_SET_PDEATHSIG kills a worker when the thread
        that started it ends.
        """
        # A worker would inherit the single CPU of a pinned thread, and take it for all CPUs.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, config.from_environment().available_cpus)
        try:
            for spec in specs:
                worker = _Worker(spec, entry, size, self._log)
                self._running.append(worker)
                self.pids[spec.rank], self.channels[spec.rank] = worker.pid, worker.channel
            started.set_result(None)
            self._watch()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            self._end_all()
            os.close(self._wakening)

    def _watch(self) -> None:
        """Watch the workers; return when all have ended or have to be ended."""
        poll = select.poll()
        poll.register(self._wakening, select.POLLIN)
        for worker in self._running:
            poll.register(worker.channel.connection, 0)  # its end only: others read its messages
            poll.register(worker.errors, select.POLLIN)
        while self._running:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakening in ready:
                return  # close
            for worker in self._running:
                if worker.errors in ready and not worker.pass_errors_on():
                    poll.unregister(worker.errors)
            for worker in [one for one in self._running if one.channel.connection.fileno() in ready]:
                poll.unregister(worker.channel.connection)
                with contextlib.suppress(KeyError):
                    poll.unregister(worker.errors)
                if not self._record_end(worker):
                    return

    def _record_end(self, worker: _Worker) -> bool:
        """Record the end of a worker; return False, after calling `on_death`, if it must not have ended."""
        status = worker.finish(_EXIT_S)
        self._running.remove(worker)
        if self._is_closing or (status == 0 and self._may_finish):
            return True
        reason = worker.reason_of_end(status)
        _log.error("rank %d %s", worker.rank, reason)
        if self._on_death is not None:
            try:
                self._on_death(worker.rank, reason)
            except Exception:
                _log.exception("on_death for rank %d failed", worker.rank)
        return False

    def _end_all(self) -> None:
        for worker in self._running:
            worker.terminate()
        deadline_s = time.monotonic() + self._grace_s
        for worker in self._running:
            worker.finish(max(deadline_s - time.monotonic(), 0))
        self._running.clear()


class _Worker(Child):
    """A worker process, and the read end of its standard output and error."""

    def __init__(self, spec: WorkerSpec, entry: str, size: int, log: LogSettings) -> None:
        self.rank = spec.rank
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._line = b""
        self.errors, errors_end = os.pipe()
        os.set_blocking(self.errors, False)
        try:
            super().__init__(
                entry,
                {"rank": spec.rank, "size": size, "payload": dict(spec.payload), "fds": list(spec.fds)},
                fds=spec.fds,
                output=errors_end,
                errors=errors_end,
                ends_with_thread=True,
                log=log,
                binding=spec.binding,
            )
        except BaseException:
            os.close(self.errors)
            raise
        finally:
            os.close(errors_end)

    def pass_errors_on(self) -> bool:
        """Pass on new output of the worker to standard error; return False at the end of its output."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.errors, 65536):
                *lines, self._line = (self._line + data).split(b"\n")
                for line in lines:
                    self._pass_on(line)
                if len(self._line) > _MAX_LINE_BYTES:
                    self._pass_on(self._line)
                    self._line = b""
            return False
        return True

    def finish(self, timeout_s: float) -> int:
        """Wait for the end of the process, pass on its remaining output and return the exit status."""
        status = super().finish(timeout_s)
        self.pass_errors_on()
        if self._line:
            self._pass_on(self._line)
        os.close(self.errors)
        return status

    def reason_of_end(self, status: int) -> str:
        how = cause_of_end(status)
        return "\n".join([f"{how}; its last output:", *self._last_lines] if self._last_lines else [how])

    def _pass_on(self, line: bytes) -> None:
        self._last_lines.append(line.decode(errors="replace"))
        # Not sys.stderr: a thread that holds its lock when the interpreter ends would abort the process.
        with contextlib.suppress(OSError):
            os.write(2, f"rank {self.rank}: ".encode() + line + b"\n")
