"""What may end a batch before all is done."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from typing import Any

ENGINE_LOST = 70  # exit status when a thread of the engine's ended by an error
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger(__name__)


class Ending:
    """Cancels a task when a signal comes, or when a thread ends by an error: its requests would be waited for in vain.

    A second signal does what it always does.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._loop = asyncio.get_running_loop()
        self.status = 0  # to exit with; 0: nothing ended it

    def __enter__(self) -> Ending:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._end, 128 + number)
        self._other_hook, threading.excepthook = threading.excepthook, self._on_thread_error
        return self

    def __exit__(self, *error: object) -> None:
        threading.excepthook = self._other_hook
        self._give_signals_back()

    def _end(self, status: int) -> None:
        self.status = status
        self._task.cancel()
        self._give_signals_back()

    def _give_signals_back(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _on_thread_error(self, arguments: threading.ExceptHookArgs) -> None:
        _log.critical("a thread ended", exc_info=arguments.exc_value)
        self._loop.call_soon_threadsafe(self._end, ENGINE_LOST)
