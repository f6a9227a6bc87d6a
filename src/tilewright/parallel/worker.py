"""The process of a rank: it ends with its parent, takes its CPUs, and calls an entry point.

Started by launch.py as `python -m tilewright.parallel.worker RANK FD`; the file FD says all else (`WorkerTask`).
Nothing here imports torch: the CPUs are claimed before it counts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from tilewright.host.binding import RankBinding, claim_cpus

_PR_SET_PDEATHSIG = 1
FAILED = 1  # exit status when the entry point, or a thread, raises

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerTask:
    """What a worker is to do: plain data."""

    entry: str  # "package.module:function", called with (rank, size, payload, fds)
    rank: int
    size: int
    payload: dict[str, Any]
    fds: list[int]
    lifeline: int  # a pipe's end that is open as long as the worker lives
    binding: dict[str, Any] | None
    log_level: int
    parent: int
    path: list[str]  # sys.path of the parent

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> WorkerTask:
        return WorkerTask(**json.loads(text))


def main(task_fd: int) -> None:
    """Does what the task says, to the end of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with open(task_fd, "rb") as file:
        task = WorkerTask.from_json(file.read())
    _end_with(task.parent)
    threading.excepthook = _end_with_thread
    for fd in (task.lifeline, *task.fds):  # not for processes that it starts itself
        os.set_inheritable(fd, False)
    sys.path += [entry for entry in task.path if entry not in sys.path]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tilewright").setLevel(task.log_level)
    try:
        if task.binding is not None:
            claim_cpus(RankBinding.from_json(task.binding))
        _find(task.entry)(task.rank, task.size, task.payload, task.fds)
    except Exception:
        _fail(traceback.format_exc())


def _end_with(parent: int) -> None:
    """Has the system kill this process when the thread that started it ends, which launch.py keeps alive."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("this process may outlive its parent: prctl: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before the call
        os._exit(FAILED)


def _find(entry: str) -> Callable[[int, int, dict[str, Any], list[int]], None]:
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """A rank without one of its threads would keep the others waiting."""
    _fail("".join(traceback.format_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)))


def _fail(trace: str) -> NoReturn:
    """Ends the process at once: the usual end would wait for threads that may never end."""
    with contextlib.suppress(OSError):
        sys.stderr.write(trace)
        sys.stderr.flush()
    os._exit(FAILED)


if __name__ == "__main__":
    main(int(sys.argv[2]))
