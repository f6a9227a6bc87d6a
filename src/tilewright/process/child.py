"""A child process: how it is started, what it is given, and how it ends.

Every child is a Python process that calls one function, its entry, with a channel to its parent and arguments of
JSON's types. The channel's first message says all else, such as where the log goes. Both ends see it close when the
other process ends, however that ends. Nothing here imports torch: CPUs are claimed before it counts them.
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

# The package may be on the path by other ways than an installation.
BOOT = "import sys; sys.path[:] = sys.argv[2:]; from tilewright.process.child import main; main()"
FAILED = 1  # exit status when the entry raises
THREAD_LOST = 70  # and when a thread does
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Child:
    """A process that runs `entry` ("package.module:function"), and our end of its channel."""

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
        """Start the process; OSError if the system has no room for it.

        `fds` are inherited under the same numbers, nothing else is. With an `environment` of its own it inherits no
        folder either. A child without a session of its own ignores the signals that a terminal or a service manager
        sends to the whole group: its parent decides. `ends_with_thread` has the system kill it when the calling thread
        ends, and so with this process. `max_bytes` bounds a message from it.
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
        frame = encode(task)  # before there is a process that would wait for it
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, max_bytes)
        path = [folder or os.getcwd() for folder in sys.path]
        options = [] if environment is None else ["-I"]
        program = f"{entry!r}; {BOOT}"  # it is what `ps` shows
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
            with contextlib.suppress(ConnectionError):  # it has ended already, which whoever waits for it will see
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
        """Return the exit status; None if it still runs after that time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> int:
        """End it now, and return its exit status."""
        self._process.kill()
        return self._process.wait()

    def finish(self, timeout_s: float) -> int:
        """Return the exit status of a process that is about to end, and is killed if it does not within that time."""
        status = self.wait(timeout_s)
        return self.kill() if status is None else status

    def end(self) -> None:
        """End it now, and close the channel."""
        self.kill()
        self.channel.close()


def main() -> None:
    """Call the entry, in a process that `Child` has started."""
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
    for fd in (channel.connection.fileno(), *task["fds"]):  # not for processes that it starts itself
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
        os._exit(FAILED)  # the usual end would wait for threads that may never end


def _end_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("this process may outlive its parent: prctl: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before the call
        os._exit(FAILED)


def end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """End the process when a thread fails: whoever started it sees that, while one without its thread would hang."""
    if isinstance(arguments.exc_value, BrokenPipeError | ConnectionResetError):
        os._exit(0)
    _log.critical("a thread failed", exc_info=arguments.exc_value)
    os._exit(THREAD_LOST)
