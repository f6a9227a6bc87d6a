"""What the processes behind the server share: a channel to it, and an end that leaves nothing half alive.

Each is started by a `supervisor.SupervisedProcess` and runs until the other end of its socket closes. It ignores SIGINT
and SIGTERM, which a terminal or a service manager sends to all processes: the server drains its requests first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from tilewright.server.http import log
from tilewright.server.link import wire

_log = logging.getLogger(__name__)
THREAD_LOST = 70  # exit status when a thread fails
KNOWN_LIMITS = "known_limits"  # of the machine: in an engine's message that it is ready, and in the next one's options


class ServerChannel:
    """Messages over a socket, blocking. Many threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._file = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        frame = wire.encode(message)
        with self._sending:
            for buffer in frame:
                self._connection.sendall(buffer)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end has closed."""
        with contextlib.suppress(ConnectionResetError, EOFError):
            (text_bytes,) = wire.HEAD.unpack(self._read(wire.HEAD.size))
            envelope = wire.decode(self._read(text_bytes))
            return envelope.fill([self._read(size) for size in envelope.sizes])
        return None

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError
        return data


def run_process(socket_fd: int, serve: Callable[[ServerChannel, dict[str, Any]], None]) -> int:
    """The exit status of a process that serves with the options of its first message."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = ServerChannel(socket.socket(fileno=socket_fd))
    message = channel.receive()
    if message is None:
        return 0
    log.configure(message["log_is_json"], message["log_level"])
    threading.excepthook = end_with_thread
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
        serve(channel, message["options"])
    return 0


def end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """Ends the process when a thread fails: the server restarts it, while one without its thread would hang."""
    if isinstance(arguments.exc_value, BrokenPipeError | ConnectionResetError):
        os._exit(0)
    _log.critical("a thread failed", exc_info=arguments.exc_value)
    os._exit(THREAD_LOST)
