"""Signals and failed threads, which stop a batch early."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from typing import Any

ENGINE_LOST = 70  # exit status when a thread of the engine fails
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger(__name__)


class Interruption:
    """Cancels a task when a signal comes, or when a thread fails: the requests it had would never end.

    A second signal has its usual effect.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._loop = asyncio.get_running_loop()
        self.status = 0  # exit status; 0: not interrupted

    def __enter__(self) -> Interruption:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._stop, 128 + number)
        self._other_hook, threading.excepthook = threading.excepthook, self._on_thread_error
        return self

    def __exit__(self, *error: object) -> None:
        threading.excepthook = self._other_hook
        self._restore_signals()

    def _stop(self, status: int) -> None:
        self.status = status
        self._task.cancel()
        self._restore_signals()

    def _restore_signals(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _on_thread_error(self, arguments: threading.ExceptHookArgs) -> None:
        _log.critical("a thread failed", exc_info=arguments.exc_value)
        self._loop.call_soon_threadsafe(self._stop, ENGINE_LOST)
