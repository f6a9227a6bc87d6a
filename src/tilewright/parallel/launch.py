"""Starts the worker processes of ranks, watches them, and ends them.

    workers = Workers("package.module:function", [WorkerSpec(rank=1, payload={...}, binding=...)], size=2,
                      on_death=lambda rank, reason: ...)
    ...
    workers.close()

A worker ends with this process however that ends, and when another worker dies: what a group of ranks computes needs
all of them. What they compute, and how they talk to each other, is not known here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tilewright import config
from tilewright.host.binding import RankBinding
from tilewright.parallel.worker import WorkerTask

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_EXIT_S = 1.0  # from the end of the lifeline to the end of the process: unmapping a model's weights takes a while
_NUM_LAST_LINES = 20  # of standard error in the reason of a death: the end of a trace
_MAX_LINE_BYTES = 8192  # longer ones are passed on in pieces

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """One worker: what it is given. `payload` is JSON; `fds` it inherits under the same numbers."""

    rank: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    fds: Sequence[int] = ()
    binding: RankBinding | None = None


class Workers:
    """Worker processes, each in `entry`(rank, size, payload, fds), until `close` or until one of them dies.

    `on_death` is called once, from another thread, with the rank and the reason, before the others are ended. A worker
    may not return before `close`, unless `may_finish`. `log_level` is that of our own log in the workers, whose
    standard output and error are passed on to standard error, as "rank 1: " and the line.
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
        if ":" not in entry:
            raise ValueError(f"entry is {entry!r}, expected package.module:function")
        self._on_death = on_death
        self._may_finish = may_finish
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._running: list[_Worker] = []
        self._is_closing = False
        self.pids: dict[int, int] = {}  # by rank
        tasks = [_task(entry, spec, size, log_level) for spec in specs]
        started: Future[None] = Future()
        self._wakening, closing_end = os.pipe()
        self._closing_end: int | None = closing_end  # closed, it wakes the thread
        self._thread = threading.Thread(target=self._run, args=(tasks, started), name="workers", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether all workers have ended within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends all workers, and returns when they have ended; in `on_death` at once: they end after it."""
        self._is_closing = True
        with self._lock:
            if self._closing_end is not None:
                os.close(self._closing_end)
                self._closing_end = None
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, tasks: Sequence[WorkerTask], started: Future[None]) -> None:
        """Starts the workers and watches them. It does both since a worker is killed when the thread that started it
        ends, not only with the process: PR_SET_PDEATHSIG."""
        # Of a pinned thread a worker would inherit one CPU, and take that for all there are.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, config.from_environment().available_cpus)
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._wakening, selectors.EVENT_READ)
                for task in tasks:
                    worker = _Worker(task)
                    self._running.append(worker)
                    self.pids[task.rank] = worker.process.pid
                    selector.register(worker.lifeline, selectors.EVENT_READ, worker)
                    selector.register(worker.errors, selectors.EVENT_READ, worker)
                started.set_result(None)
                self._watch(selector)
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)
            finally:
                self._end_all()
                os.close(self._wakening)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Returns when the workers must end, or have."""
        while self._running:
            ended = []
            for key, _ in selector.select():
                worker = key.data
                if worker is None:
                    return  # close
                if key.fd == worker.lifeline:
                    ended.append(worker)
                elif not worker.pass_errors_on():
                    selector.unregister(worker.errors)
            for worker in ended:
                selector.unregister(worker.lifeline)
                if worker.errors in selector.get_map():
                    selector.unregister(worker.errors)
                if not self._note_end(worker):
                    return

    def _note_end(self, worker: _Worker) -> bool:
        """Whether it may have ended; else all are told."""
        status = worker.finish(_EXIT_S)
        self._running.remove(worker)
        if self._is_closing or (status == 0 and self._may_finish):
            return True
        reason = worker.reason_of_end()
        _log.error("rank %d %s", worker.rank, reason)
        if self._on_death is not None:
            try:
                self._on_death(worker.rank, reason)
            except Exception:
                _log.exception("telling of the death of rank %d failed", worker.rank)
        return False

    def _end_all(self) -> None:
        for worker in self._running:
            worker.process.terminate()
        deadline_s = time.monotonic() + self._grace_s
        for worker in self._running:
            worker.finish(max(deadline_s - time.monotonic(), 0))
        self._running.clear()


def _task(entry: str, spec: WorkerSpec, size: int, log_level: int) -> WorkerTask:
    return WorkerTask(
        entry=entry,
        rank=spec.rank,
        size=size,
        payload=dict(spec.payload),
        fds=list(spec.fds),
        lifeline=-1,  # each process gets its own
        binding=None if spec.binding is None else spec.binding.to_json(),
        log_level=log_level,
        parent=os.getpid(),
        path=[entry or os.getcwd() for entry in sys.path],
    )


class _Worker:
    """One process, and our ends of its lifeline and its standard error."""

    def __init__(self, task: WorkerTask) -> None:
        self.rank = task.rank
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._line = b""
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as theirs:
            self.lifeline, lifeline_end = os.pipe()
            on_error.callback(os.close, self.lifeline)
            theirs.callback(os.close, lifeline_end)
            self.errors, errors_end = os.pipe()
            on_error.callback(os.close, self.errors)
            theirs.callback(os.close, errors_end)
            task_fd = os.memfd_create("tilewright_task")
            theirs.callback(os.close, task_fd)
            with open(task_fd, "wb", closefd=False) as file:
                file.write(dataclasses.replace(task, lifeline=lifeline_end).to_json())
            os.lseek(task_fd, 0, os.SEEK_SET)
            os.set_blocking(self.errors, False)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tilewright.parallel.worker", str(task.rank), str(task_fd)],
                stdin=subprocess.DEVNULL,
                stdout=errors_end,
                stderr=errors_end,
                pass_fds=(task_fd, lifeline_end, *task.fds),
                start_new_session=True,  # no terminal, and no Ctrl-C from one
            )
            on_error.pop_all()

    def pass_errors_on(self) -> bool:
        """Passes on what the worker has written to standard error; False once there is no more to come."""
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
        """The exit status of the process, which is killed if it has none in time. All its files are closed."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.pass_errors_on()
        if self._line:
            self._pass_on(self._line)
        os.close(self.errors)
        os.close(self.lifeline)
        return status

    def reason_of_end(self) -> str:
        status = self.process.returncode
        how = f"died of {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return "\n".join([f"{how}; the last it wrote:", *self._last_lines] if self._last_lines else [how])

    def _pass_on(self, line: bytes) -> None:
        self._last_lines.append(line.decode(errors="replace"))
        # Not sys.stderr: a thread that holds its lock when the interpreter ends would abort the process.
        with contextlib.suppress(OSError):
            os.write(2, f"rank {self.rank}: ".encode() + line + b"\n")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
