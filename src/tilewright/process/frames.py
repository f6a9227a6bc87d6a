"""Messages between processes, in frames over a socket: JSON that may contain bytes anywhere.

A frame is HEAD, a JSON text, and the message's bytes, whose paths and sizes are in the text. The reader bounds the size
and checks everything else: the other process may have been compromised by a file that it decoded.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

HEAD = struct.Struct("<Q")  # bytes of the JSON text
MAX_BYTES = 1 << 32  # for the text, and for all bytes after it, between processes that trust each other
MAX_FDS = 4  # per message

LeftTime = Callable[[], float]  # returns the remaining seconds to wait; raises when there are none


class FrameError(ValueError):
    """The received bytes are not a message, or exceed the bound."""


def encode(message: Mapping[str, Any]) -> list[bytes]:
    """Return the frame of a message of JSON types and bytes, as buffers to write in order, without copying bytes."""
    blobs: list[bytes] = []
    paths: list[list[str | int]] = []
    value = _lift(message, [], paths, blobs)
    text = json.dumps([value, paths, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return [HEAD.pack(len(text)) + text, *blobs]


def _lift(value: Any, path: list[str | int], paths: list[list[str | int]], blobs: list[bytes]) -> Any:
    """Return the value without its bytes; append these to `blobs` and their paths to `paths`.

    Text in a request could forge a marker in place of bytes, but not a path.
    """
    if isinstance(value, bytes):
        paths.append(path)
        blobs.append(value)
        return None
    if isinstance(value, Mapping):
        return {key: _lift(item, [*path, key], paths, blobs) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lift(item, [*path, index], paths, blobs) for index, item in enumerate(value)]
    return value


def decode(max_bytes: int = MAX_BYTES) -> Generator[int, bytes, dict[str, Any]]:
    """Decode a frame: yield the number of bytes to read next, receive them by `send`, and return the message.

    Sizes are checked before anything is read. Each blob is read separately, which saves a copy.
    """
    (text_bytes,) = HEAD.unpack((yield HEAD.size))
    _check_size(text_bytes, max_bytes)
    text = yield text_bytes
    try:
        message, paths, sizes = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError("a message that is not JSON of this form") from error
    if not (isinstance(message, dict) and isinstance(paths, list) and isinstance(sizes, list)):
        raise FrameError("a message that is not an object")
    if len(paths) != len(sizes) or not all(type(size) is int and size >= 0 for size in sizes):
        raise FrameError("bytes of an invalid size")
    _check_size(sum(sizes), max_bytes)
    for path, size in zip(paths, sizes, strict=True):
        blob = yield size
        try:
            holder: Any = message
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = blob
        except (LookupError, TypeError) as error:
            raise FrameError("bytes without a place") from error
    return message


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise FrameError(f"a message of {num_bytes} bytes, the limit is {max_bytes}")


def until(timeout_s: float) -> LeftTime:
    """Return a LeftTime that raises TimeoutError `timeout_s` seconds from now."""
    deadline_s = time.monotonic() + timeout_s

    def left_s() -> float:
        left = deadline_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    return left_s


class Channel:
    """One end of a blocking stream socket between two processes. Many threads may send, one receives.

    Calls with `left_s` wait no longer than it returns; if one call has it, all calls on this end must.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self.connection = connection
        self._max_bytes = max_bytes
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = (), left_s: LeftTime | None = None) -> None:
        """Send a message with file descriptors; raise OSError if the other end has closed."""
        head, *blobs = encode(message)
        with self._sending:
            num_sent = socket.send_fds(self.connection, [head], fds) if fds else 0
            self._send_all(memoryview(head)[num_sent:], left_s)
            for blob in blobs:
                self._send_all(memoryview(blob), left_s)

    def receive(self, left_s: LeftTime | None = None, fds: list[int] | None = None) -> dict[str, Any] | None:
        """Return the next message, and append its descriptors to `fds`; return None when the other end has closed.

        Raise FrameError for an invalid message.
        """
        reading = decode(self._max_bytes)
        wanted = next(reading)
        try:
            if fds is not None:
                head, received, *_ = socket.recv_fds(self.connection, wanted, MAX_FDS)
                fds += received
                wanted = reading.send(head + self._read(wanted - len(head), left_s))
            while True:
                wanted = reading.send(self._read(wanted, left_s))
        except StopIteration as end:
            message: dict[str, Any] = end.value
            return message
        except (ConnectionError, EOFError):
            return None

    def close(self) -> None:
        self.connection.close()

    def _send_all(self, view: memoryview, left_s: LeftTime | None) -> None:
        if left_s is None:
            self.connection.sendall(view)
            return
        while view:
            self.connection.settimeout(left_s())
            try:
                view = view[self.connection.send(view) :]
            except TimeoutError:
                continue  # left_s raises when the time is up

    def _read(self, num_bytes: int, left_s: LeftTime | None) -> bytes:
        parts: list[bytes] = []
        while num_bytes:
            if left_s is not None:
                self.connection.settimeout(left_s())
            try:
                part = self.connection.recv(num_bytes, socket.MSG_WAITALL)
            except TimeoutError:
                continue
            if not part:
                raise EOFError
            parts.append(part)
            num_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
