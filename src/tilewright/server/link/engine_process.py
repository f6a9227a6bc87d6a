"""The engine process: reads requests from a socket, writes the events of each step.

Started by `remote.RemoteBackend`, it runs until the other end of the socket closes. It ignores SIGINT and SIGTERM,
which a terminal or a service manager sends to both processes: the server drains its requests first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

from tilewright.engine_flags import make_engine
from tilewright.inputs.media import MediaLimits
from tilewright.server import log_lines
from tilewright.server.link import wire
from tilewright.server.link.outbox import Outbox
from tilewright.server.link.service import EngineService
from tilewright.types import RequestError

_log = logging.getLogger(__name__)
# Measures the machine's limits, which /metrics compares the engine with: 0.7 s of the start, buffers included.
MEASURE_S = 0.2
ENGINE_LOST = 70  # exit status when a thread of the engine fails


def main(socket_fd: int) -> int:
    """The exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=socket_fd))
    message = channel.receive()
    if message is None:
        return 0
    log_lines.configure(message["log_is_json"], message["log_level"])
    threading.excepthook = end_with_thread
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
        serve(channel, message["engine"])
    return 0


def serve(channel: Channel, options: dict[str, Any]) -> None:
    """Serves requests until the other end closes."""
    from tilewright import machine

    try:
        engine = make_engine(**{**options, "media_limits": MediaLimits(**options["media_limits"])})
    except RequestError as error:
        channel.send({"refused": str(error)})
        return
    outbox = Outbox(lambda events: channel.send({"events": [[id, wire.event_to_json(event)] for id, event in events]}))
    engine.loop.after_step = outbox.flush
    measured = machine.measure(MEASURE_S)
    gemm_tflops = measured.fp32_tflops if options.get("dtype") == "float32" else measured.bf16_tflops
    service = EngineService(engine, outbox.put, (measured.read_gb_s * 1e9, gemm_tflops * 1e12))
    with engine:
        channel.send({"ready": dataclasses.asdict(service.model())})
        while (message := channel.receive()) is not None:
            _handle(message, service, channel)
            outbox.flush()


def _handle(message: dict[str, Any], service: EngineService, channel: Channel) -> None:
    if "submit" in message:
        service.submit(message["submit"], wire.request_from_json(message["request"]))
    elif "abort" in message:
        service.abort(message["abort"])
    elif "stats" in message:
        channel.send({"stats": message["stats"], "values": service.stats()})
    else:
        raise ValueError(f"unknown message with {sorted(message)}")


class Channel:
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


def end_with_thread(arguments: threading.ExceptHookArgs) -> None:
    """Ends the process when a thread fails: the server restarts it, while an engine without its thread would hang."""
    if isinstance(arguments.exc_value, BrokenPipeError | ConnectionResetError):
        os._exit(0)
    _log.critical("a thread failed", exc_info=arguments.exc_value)
    os._exit(ENGINE_LOST)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
