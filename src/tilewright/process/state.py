"""What Linux says of a child process: whether it is stopped, whether it computes, and whether others ended it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

# What a user, a service manager or the system that is short of memory sends. A process that exceeds its own limits ends
# by SIGABRT, SIGSEGV, SIGSYS or SIGXCPU, or with a status.
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_LEAST_SHARE = 0.05  # of a CPU, below which a process does not compute


def how_ended(status: int | None) -> str:
    """An exit status as `subprocess` has it, in words: "signal SIGKILL", "status 1"."""
    return f"status {status}" if status is None or status >= 0 else f"signal {_signal_name(-status)}"


def cause_of_end(status: int) -> str:
    """An exit status as the end of a sentence: "died of SIGKILL", "ended with status 1"."""
    return f"died of {_signal_name(-status)}" if status < 0 else f"ended with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def was_ended_from_outside(status: int | None) -> bool:
    """Whether the process was killed by others, which says nothing about what it computed."""
    return status is not None and -status in _OUTSIDE_SIGNALS


def is_stopped(pid: int) -> bool:
    """Whether it is stopped, by SIGSTOP or a debugger."""
    return _state(Path(f"/proc/{pid}")) in ("T", "t")


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all its threads, those that have ended included; 0 of a process that is gone."""
    fields = _fields(Path(f"/proc/{pid}"))
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


class ActivityProbe:
    """Tells whether a process is doing something between the probe's making and a look at it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._began_s = time.monotonic()
        self._began_cpu_s = cpu_seconds(pid)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the probe was made."""
        return time.monotonic() - self._began_s

    @property
    def used_s(self) -> float:
        """CPU seconds used since then."""
        return cpu_seconds(self.pid) - self._began_cpu_s

    def is_computing(self) -> bool:
        """Whether it has computed, or would if it were given a CPU. One that is swapped out or stopped does neither."""
        if self.used_s > _LEAST_SHARE * self.elapsed_s:
            return True
        threads = Path(f"/proc/{self.pid}/task")
        return any(_state(thread) == "R" for thread in (threads.iterdir() if threads.exists() else ()))


def _state(folder: Path) -> str | None:
    fields = _fields(folder)
    return fields[0] if fields else None


def _fields(folder: Path) -> list[str]:
    """The fields of its `stat` behind the name, from the state on; none of a process or thread that is gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
