"""A child process: its start, its arguments and its end.

Every child is a Python process that calls one function, its entry, with a channel to its parent and arguments of JSON
types. The channel's first message has everything else, such as the log's settings. Each end sees the channel close
when the other process ends for any reason. Nothing here imports torch: CPUs are claimed before it counts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.host.binding import RankBinding, claim_cpus
from tilewright.process.frames import MAX_BYTES, Channel, encode
from tilewright.process.log import PLAIN, LogSettings

# The parent's path is passed on: the package may be importable without being installed.
BOOT = "import sys; sys.path[:] = sys.argv[2:]; from tilewright.process.child import main; main()"
FAILED = 1  # exit status when the entry raises
THREAD_LOST = 70  # exit status when a thread raises
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Child:
    """A process that runs `entry` ("package.module:function"), and the parent's end of its channel."""

    def __init__(
        self,
        entry: str,
        arguments: Mapping[str, Any],
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
        errors: int | None = None,
        has_own_session: bool = True,
        ends_with_thread: bool = False,
        log: LogSettings = PLAIN,
        binding: RankBinding | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Start the process; raise OSError if the system cannot.

        It inherits only the descriptors `fds`, under the same numbers. With an `environment` it runs in / instead of
        the parent's folder. A child without a session of its own ignores signals that a terminal or a service manager
        sends to the whole group: its parent decides. With `ends_with_thread` the system kills it when the calling
        thread ends, and so when this process ends. `max_bytes` bounds messages from it.
        """
        if ":" not in entry:
            raise ValueError(f"entry is {entry!r}, expected package.module:function")
        task = {
            "entry": entry,
            "arguments": dict(arguments),
            "fds": list(fds),
            "ignores_sigterm": not has_own_session,
            "parent": os.getpid() if ends_with_thread else None,
            "log": dataclasses.asdict(log),
            "binding": None if binding is None else binding.to_json(),
        }
        frame = encode(task)  # may raise, so before the process is started
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, max_bytes)
        path = [folder or os.getcwd() for folder in sys.path]
        options = [] if environment is None else ["-I"]
        program = f"{entry!r}; {BOOT}"  # shown by `ps`
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *options, "-c", program, str(theirs.fileno()), *path],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=environment,
                    cwd=None if environment is None else "/",
                    pass_fds=(theirs.fileno(), *fds),
                    start_new_session=has_own_session,
                )
            with contextlib.suppress(ConnectionError):  # it has already ended, which its status will show
                for buffer in frame:
                    ours.sendall(buffer)
        except BaseException:
            self.channel.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status; None if the process still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the process to end, with SIGTERM."""
        self._process.terminate()

    def kill(self) -> int:
        """Kill the process and return its exit status."""
        self._process.kill()
        return self._process.wait()

    def finish(self, timeout_s: float) -> int:
        """Wait for the end of the process, kill it after `timeout_s`, and return the exit status."""
        status = self.wait(timeout_s)
        return self.kill() if status is None else status

    def end(self) -> None:
        """Kill the process and close the channel."""
        self.kill()
        self.channel.close()


def main() -> None:
    """Call the entry; the main function of a process that `Child` started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    task = channel.receive()
    if task is None:
        os._exit(FAILED)
    if task["ignores_sigterm"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    LogSettings(**task["log"]).configure()
    if task["parent"] is not None:
        _end_with(task["parent"])
    threading.excepthook = end_with_thread
    for fd in (channel.connection.fileno(), *task["fds"]):  # not for its own child processes
        os.set_inheritable(fd, False)
    try:
        if task["binding"] is not None:
            claim_cpus(RankBinding.from_json(task["binding"]))
        module, _, function = task["entry"].partition(":")
        getattr(importlib.import_module(module), function)(channel, **task["arguments"])
    except (BrokenPipeError, ConnectionResetError):  # the parent has ended
        os._exit(0)
    except Exception:
        _log.critical("%s failed", task["entry"], exc_info=True)
        os._exit(FAILED)  # a normal exit would wait for threads that may never end


def _end_with(parent: int) -> None:
    """Let the system kill this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("this process may outlive its parent: prctl: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(FAILED)


def end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """End the process when a thread fails: the parent notices its end, but not that it hangs without the thread."""
    if isinstance(arguments.exc_value, BrokenPipeError | ConnectionResetError):
        os._exit(0)
    _log.critical("a thread failed", exc_info=arguments.exc_value)
    os._exit(THREAD_LOST)
