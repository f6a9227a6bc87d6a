"""Starts and leases decoder processes, and replaces them when they fail or have decoded their number of items."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.process.child import Child
from tilewright.process.frames import FrameError, until
from tilewright.process.state import cause_of_end, how_ended, is_stopped, was_ended_from_outside
from tilewright.types import TransientError

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**23  # the times of a million frames; pixels and samples go through shared memory
_ENTRY = "tilewright.inputs.isolation.main:main"
# The complete environment of a decoder. One thread; freed memory is kept for the next item, since fresh pages cost more
# than decoding a JPEG.
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}
_START_TIMEOUT_S = 60.0  # 0.2 on an idle machine
_SEND_TIMEOUT_S = 10.0  # messages are small: sending blocks only if the other side hangs
_EXIT_TIMEOUT_S = 5.0  # from the end of its channel to the end of a process
_KEPT_SHARED_BYTES = 16 * 2**20  # larger ones are truncated after an item


class DecoderFailed(Exception):
    """The process died, timed out or sent an invalid reply; it is not used again."""


class DecoderKilled(DecoderFailed):
    """The process was killed from outside or is stopped; the item is not at fault."""


class DecoderProcess(Child):
    """A decoder process, and the memory shared with it.

    Only the decoder maps that memory; this process reads and writes it as a file. If the decoder changes it meanwhile,
    the result is wrong pixels at worst.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._shared_fd = os.memfd_create("tilewright-media")
        self._num_awaited = 1  # messages; the first says that it is ready
        self.is_ready = False
        self.has_failed = False
        self.holds: object = None  # token of the item that is open in the process
        self.num_items = 0
        try:
            super().__init__(
                _ENTRY,
                {"shared_fd": self._shared_fd, "memory_bytes": memory_bytes},
                fds=(self._shared_fd,),
                environment=_ENVIRONMENT,
                output=subprocess.DEVNULL,
                max_bytes=MAX_MESSAGE_BYTES,
            )
        except OSError:
            os.close(self._shared_fd)
            raise

    @property
    def is_reusable(self) -> bool:
        return not self.has_failed and self._num_awaited == 0

    def wait_until_ready(self) -> None:
        """Wait until the process has confined itself; raise TransientError if it cannot start."""
        if self.is_ready:
            return
        try:
            message = self.receive(_START_TIMEOUT_S)
        except (DecoderFailed, TimeoutError) as error:
            self.has_failed = True
            raise TransientError(f"the process that decodes media did not start: {error or 'no answer'}") from error
        _warn_of(tuple(message["missing"]))
        self.is_ready = True

    def send(self, message: dict[str, Any]) -> None:
        self._num_awaited += 1
        try:
            self.channel.send(message, left_s=until(_SEND_TIMEOUT_S))
        except OSError as error:
            raise self._death() from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next reply; raise TimeoutError if it is not complete in time, DecoderFailed if none can come."""
        try:
            reply = self.channel.receive(until(timeout_s))
        except TimeoutError:
            if is_stopped(self.pid):
                raise DecoderKilled("the process that decodes media is stopped") from None
            raise
        except FrameError as error:
            raise DecoderFailed(f"it answered with {error}") from error
        if reply is None:
            raise self._death()
        self._num_awaited -= 1
        return reply

    def write(self, data: bytes) -> None:
        """Write an item's bytes to the shared memory."""
        view, at = memoryview(data), 0
        while at < len(data):
            at += os.pwrite(self._shared_fd, view[at:], at)

    def reserve(self, size_bytes: int) -> None:
        """Enlarge the shared memory for the process's output."""
        if os.fstat(self._shared_fd).st_size < size_bytes:
            os.ftruncate(self._shared_fd, size_bytes)

    def read(self, offset: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` from the shared memory at the offset."""
        view, at = out.reshape(-1).view(np.uint8).data, 0
        while at < len(view):
            count = os.preadv(self._shared_fd, [view[at:]], offset + at)
            if not count:
                raise DecoderFailed("it cut the shared memory short")
            at += count
        return out

    def shrink(self) -> None:
        """Truncate the shared memory after a large item."""
        if os.fstat(self._shared_fd).st_size > _KEPT_SHARED_BYTES:
            os.ftruncate(self._shared_fd, _KEPT_SHARED_BYTES)

    def kill(self) -> int:
        """Kill the process; a caller that waits for it gets DecoderFailed."""
        self.has_failed = True
        return super().kill()

    def end(self) -> None:
        super().end()
        os.close(self._shared_fd)

    def _death(self) -> DecoderFailed:
        if self.has_failed:  # `kill` has ended it
            return DecoderFailed("the process that decoded it was ended")
        status = self.wait(_EXIT_TIMEOUT_S)
        if status is None:
            if is_stopped(self.pid):
                return DecoderKilled("the process that decodes media is stopped")
            return DecoderFailed("the process that decoded it went silent")
        if was_ended_from_outside(status):
            return DecoderKilled(f"the process that decodes media was ended ({how_ended(status)})")
        return DecoderFailed(f"the process that decoded it {cause_of_end(status)}")


class DecoderPool:
    """A pool of decoder processes, one per concurrent caller; idle ones are kept for later callers."""

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
        """Lease a process to one caller: the one in which the token's item is open, if it is idle."""
        process = self._acquire(token)
        try:
            process.wait_until_ready()
            yield process
        except DecoderFailed:
            process.has_failed = True
            raise
        finally:
            self._release(process)

    def close(self) -> None:
        """End all processes, busy ones included: their callers get DecoderFailed."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            at_work = self._at_work.copy()
        for process in idle:
            process.end()
        for process in at_work:
            process.kill()

    def _acquire(self, token: object) -> DecoderProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("media are not decoded any more: the engine is closed")
            self._idle.sort(key=lambda process: process.holds is token)
            while self._idle:
                process = self._idle.pop()
                if process.status is None:
                    break
                process.end()
            else:
                try:
                    process = DecoderProcess(self._memory_bytes)
                except OSError as error:  # too many processes or open files
                    raise TransientError(f"no process that decodes media can be started: {error}") from error
            self._at_work.add(process)
            return process

    def _release(self, process: DecoderProcess) -> None:
        # An item that is open in the process will still be decoded: it is the last one, not one too many.
        has_done_its_share = process.num_items + (process.holds is None) > self._max_items_per_process
        is_reusable = process.is_reusable and not has_done_its_share
        if is_reusable:
            process.shrink()
        else:
            process.kill()
        with self._lock:
            self._at_work.discard(process)
            has_room = not self._is_closed and len(self._idle) < self._num_kept
            if has_room and is_reusable:
                self._idle.append(process)
                return
        process.end()
        if has_room:
            self._start_another()

    def _start_another(self) -> None:
        """Start a process now, so that the next caller does not wait for it."""
        try:
            process = DecoderProcess(self._memory_bytes)
        except OSError as error:
            _log.warning("a process that decodes media could not be replaced: %s", error)
            return
        with self._lock:
            if not self._is_closed and len(self._idle) < self._num_kept:
                self._idle.insert(0, process)
                return
        process.end()


@functools.cache
def _warn_of(missing: tuple[str, ...]) -> None:
    if missing:
        _log.warning("media are decoded with less protection: this system lacks %s", ", ".join(missing))
