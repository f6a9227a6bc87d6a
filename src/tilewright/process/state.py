"""Reads from Linux whether a child process is stopped, whether it computes, and whether it was ended from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

# Signals of users, service managers, or the system when memory runs out. A process that exceeds its own limits ends by
# SIGABRT, SIGSEGV, SIGSYS or SIGXCPU, or with a status.
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_LEAST_SHARE = 0.05  # share of a CPU below which a process counts as not computing


def how_ended(status: int | None) -> str:
    """Return the text of an exit status of `subprocess`: "signal SIGKILL", "status 1"."""
    return f"status {status}" if status is None or status >= 0 else f"signal {_signal_name(-status)}"


def cause_of_end(status: int) -> str:
    """Return an exit status as the end of a sentence: "died of SIGKILL", "ended with status 1"."""
    return f"died of {_signal_name(-status)}" if status < 0 else f"ended with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def was_ended_from_outside(status: int | None) -> bool:
    """Return whether the process was killed from outside, for which its work is not at fault."""
    return status is not None and -status in _OUTSIDE_SIGNALS


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, by SIGSTOP or a debugger."""
    return _state(Path(f"/proc/{pid}")) in ("T", "t")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of the process, ended ones included; 0 if the process is gone."""
    fields = _fields(Path(f"/proc/{pid}"))
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


class ActivityProbe:
    """Measures whether a process has computed since the probe was made."""

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
        """CPU seconds that the process has used since then."""
        return cpu_seconds(self.pid) - self._began_cpu_s

    def is_computing(self) -> bool:
        """Return whether the process has computed or waits for a CPU; if swapped out or stopped, it does neither."""
        if self.used_s > _LEAST_SHARE * self.elapsed_s:
            return True
        threads = Path(f"/proc/{self.pid}/task")
        return any(_state(thread) == "R" for thread in (threads.iterdir() if threads.exists() else ()))


def _state(folder: Path) -> str | None:
    fields = _fields(folder)
    return fields[0] if fields else None


def _fields(folder: Path) -> list[str]:
    """Return the fields of `stat` from the state on, after the name; none if the process or thread is gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
