"""A pack cache entry read through while its model already answers.

A start reads a sample of a large entry only; a byte that flipped on the disk elsewhere would make every answer wrong
without a word. So a thread of the lowest priority compares all of it, slowly: at 200 MB/s a model of 40 GB is through
after three and a half minutes, and takes a ninth of a core that nobody else wants, and 1 % of the memory's bandwidth.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from tilewright.weights.checksums import BLOCK_BYTES, ChecksummedData

BYTES_PER_S = 200e6
_LOWEST_PRIORITY = 19

_log = logging.getLogger(__name__)


class DamagedEntryError(RuntimeError):
    """Weights in use are not those that were packed. Their file is removed: the next start packs them anew."""


class EntryCheck:
    """The thread that reads an entry through. On damage it removes the file, calls `on_damage`, and raises the error:
    a process that ends with its threads (the server's engine) is started again, and packs anew."""

    def __init__(
        self, data: ChecksummedData, on_damage: Callable[[DamagedEntryError], object] = lambda error: None
    ) -> None:
        self._data = data
        self._on_damage = on_damage
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the check, wherever it is."""
        self._is_closing.set()
        self._thread.join()

    def join(self) -> None:
        """Waits until all is read."""
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a system that does not allow it: the pauses alone keep it slow
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for block in range(len(self._data.checksums)):
            if self._data.first_damaged([block]) is not None:
                self._fail(block)
            if self._is_closing.wait(BLOCK_BYTES / BYTES_PER_S):
                return
        _log.debug("%s is as it was written", self._data.file.path)

    def _fail(self, block: int) -> None:
        path = self._data.file.path
        begin = block * BLOCK_BYTES
        error = DamagedEntryError(
            f"{path} was damaged after it was written, in bytes {begin} to {begin + BLOCK_BYTES}: answers of this "
            "process may be wrong. The file is removed; the next start packs the weights anew"
        )
        _log.error("%s", error)
        with contextlib.suppress(OSError):  # read-only: the next start's check finds it again
            path.unlink()
        self._on_damage(error)
        raise error
