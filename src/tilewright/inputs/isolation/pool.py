"""Decoder processes: started, used, and replaced when they fail or have decoded their number of items.

Messages to and from them are a JSON header, then raw bytes. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tilewright.process.state import how_ended, is_stopped, was_ended_from_outside
from tilewright.types import TransientError

_SIZES = struct.Struct("<II")  # of the header, of the bytes after it
_MAX_HEADER_BYTES = 2**16
MAX_PAYLOAD_BYTES = 2**23  # the times of a million frames; pixels and samples go through shared memory


class WireError(Exception):
    """The bytes received are not a message."""


def pack(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """The message as it is sent."""
    text = json.dumps(header).encode()
    return _SIZES.pack(len(text), len(payload)) + text + payload


def receive(read_exactly: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """The next message; its sizes are checked before any of it is read."""
    header_bytes, payload_bytes = _SIZES.unpack(read_exactly(_SIZES.size))
    if header_bytes > _MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"a message of {header_bytes} + {payload_bytes} bytes")
    text = read_exactly(header_bytes)
    payload = read_exactly(payload_bytes)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("a header that is not JSON") from error
    if not isinstance(header, dict):
        raise WireError("a header that is no object")
    return header, payload


_log = logging.getLogger(__name__)

_START = "import sys; sys.path[:] = sys.argv[4:]; from tilewright.inputs.isolation.main import main; main()"
# Its whole environment: nothing is inherited. One thread; freed memory is kept for the next item, since fresh pages
# cost more than decoding a JPEG.
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}
_START_TIMEOUT_S = 60.0  # it takes 0.2 when the machine is idle
_SEND_TIMEOUT_S = 10.0  # messages are small: sending blocks only if the other side hangs
_KEPT_SLATE_BYTES = 16 * 2**20  # larger ones are cut back when an item is done


class DecoderFailed(Exception):
    """The process died, timed out or sent an invalid reply; it is not used again."""


class DecoderKilled(DecoderFailed):
    """The process was killed by others or is stopped, for no fault of the item."""


class DecoderProcess:
    """One process that decodes, and the memory shared with it, the slate.

    Only the other process maps the slate; here it is read and written as a file. Whatever the other does to it while
    it is read gives wrong pixels at worst.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._link, theirs = socket.socketpair()
        self._slate = os.memfd_create("tilewright-media")
        self._num_awaited = 1  # messages; the first says that it is ready
        self.is_ready = False
        self.has_failed = False
        self.holds: object = None  # the token of the item that is open there
        self.num_items = 0
        path = [entry or os.getcwd() for entry in sys.path]
        handles = (theirs.fileno(), self._slate)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, *map(str, handles), str(memory_bytes), *path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=handles,
                start_new_session=True,
            )
        except OSError:
            self._link.close()
            os.close(self._slate)
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_reusable(self) -> bool:
        return not self.has_failed and self._num_awaited == 0

    def wait_until_ready(self) -> None:
        """Returns once it has confined itself; TransientError if it cannot start, which is no fault of an item."""
        if self.is_ready:
            return
        try:
            header, _ = self.receive(_START_TIMEOUT_S)
        except (DecoderFailed, TimeoutError) as error:
            self.has_failed = True
            raise TransientError(f"the process that decodes media did not start: {error or 'no answer'}") from error
        _warn_of(tuple(header["missing"]))
        self.is_ready = True

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._num_awaited += 1
        self._link.settimeout(_SEND_TIMEOUT_S)
        try:
            self._link.sendall(pack(header, payload))
        except OSError as error:
            raise self._death() from error

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next reply; TimeoutError if it does not come whole in time, DecoderFailed if it cannot come."""
        deadline_s = time.monotonic() + timeout_s

        def read_exactly(num_bytes: int) -> bytes:
            data = bytearray(num_bytes)
            filled = 0
            while filled < num_bytes:
                self._link.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                count = self._link.recv_into(memoryview(data)[filled:])
                if not count:
                    raise EOFError
                filled += count
            return bytes(data)

        try:
            reply = receive(read_exactly)
        except TimeoutError:
            if is_stopped(self.pid):
                raise DecoderKilled("the process that decodes media is stopped") from None
            raise
        except (OSError, EOFError) as error:
            raise self._death() from error
        except WireError as error:
            raise DecoderFailed(f"it answered with {error}") from error
        self._num_awaited -= 1
        return reply

    def write(self, data: bytes) -> None:
        """Puts an item's bytes where the process reads them."""
        view, at = memoryview(data), 0
        while at < len(data):
            at += os.pwrite(self._slate, view[at:], at)

    def reserve(self, size_bytes: int) -> None:
        """Makes room for what the process is to put there."""
        if os.fstat(self._slate).st_size < size_bytes:
            os.ftruncate(self._slate, size_bytes)

    def read(self, offset: int, out: np.ndarray) -> np.ndarray:
        """Fills `out` with what the process put at the offset."""
        view, at = out.reshape(-1).view(np.uint8).data, 0
        while at < len(view):
            count = os.preadv(self._slate, [view[at:]], offset + at)
            if not count:
                raise DecoderFailed("it cut the shared memory short")
            at += count
        return out

    def put_down(self) -> None:
        """Gives memory back after a large item."""
        if os.fstat(self._slate).st_size > _KEPT_SLATE_BYTES:
            os.ftruncate(self._slate, _KEPT_SLATE_BYTES)

    def kill(self) -> None:
        """Ends the process; a caller that waits for it gets a DecoderFailed."""
        self.has_failed = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._link.close()
        os.close(self._slate)

    def _death(self) -> DecoderFailed:
        if self.has_failed:  # `kill` has ended it
            return DecoderFailed("the process that decoded it was ended")
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            if is_stopped(self.pid):
                return DecoderKilled("the process that decodes media is stopped")
            return DecoderFailed("the process that decoded it went silent")
        if was_ended_from_outside(status):
            return DecoderKilled(f"the process that decodes media was ended ({how_ended(status)})")
        how = f"died of signal {-status}" if status < 0 else f"ended with status {status}"
        return DecoderFailed(f"the process that decoded it {how}")


class DecoderPool:
    """One process per concurrent caller; idle ones are kept for the next."""

    def __init__(self, memory_bytes: int, max_items_per_process: int, num_kept: int) -> None:
        self._memory_bytes = memory_bytes
        self._max_items_per_process = max_items_per_process
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._idle: list[DecoderProcess] = []
        self._at_work: set[DecoderProcess] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def lease(self, token: object) -> Iterator[DecoderProcess]:
        """A process for one caller: the one in which the token's item is open, if that is idle."""
        process = self._take(token)
        try:
            process.wait_until_ready()
            yield process
        except DecoderFailed:
            process.has_failed = True
            raise
        finally:
            self._give_back(process)

    def close(self) -> None:
        """Ends all processes, busy ones included: their callers get a DecoderFailed."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            at_work = self._at_work.copy()
        for process in idle:
            process.close()
        for process in at_work:
            process.kill()

    def _take(self, token: object) -> DecoderProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("media are not decoded any more: the engine is closed")
            self._idle.sort(key=lambda process: process.holds is token)
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    break
                process.close()
            else:
                try:
                    process = DecoderProcess(self._memory_bytes)
                except OSError as error:  # too many processes or open files
                    raise TransientError(f"no process that decodes media can be started: {error}") from error
            self._at_work.add(process)
            return process

    def _give_back(self, process: DecoderProcess) -> None:
        # An item that is open there is about to be decoded: it is the last one, not one too many.
        has_done_its_share = process.num_items + (process.holds is None) > self._max_items_per_process
        is_reusable = process.is_reusable and not has_done_its_share
        if is_reusable:
            process.put_down()
        else:
            process.kill()
        with self._lock:
            self._at_work.discard(process)
            has_room = not self._is_closed and len(self._idle) < self._num_kept
            if has_room and is_reusable:
                self._idle.append(process)
                return
        process.close()
        if has_room:
            self._start_another()

    def _start_another(self) -> None:
        """Starts a process now, so that the next caller need not wait for it."""
        try:
            process = DecoderProcess(self._memory_bytes)
        except OSError as error:
            _log.warning("a process that decodes media could not be replaced: %s", error)
            return
        with self._lock:
            if not self._is_closed and len(self._idle) < self._num_kept:
                self._idle.insert(0, process)
                return
        process.close()


@functools.cache
def _warn_of(missing: tuple[str, ...]) -> None:
    if missing:
        _log.warning("media are decoded with less protection: this system lacks %s", ", ".join(missing))
