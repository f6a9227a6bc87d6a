"""Pixels of a medium that are decoded when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from torch import Tensor


class Pixels:
    """8-bit RGB, decoded once; may be asked for by several threads."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read
        self._pixels: Tensor | None = None
        self._lock = Lock()

    def __call__(self) -> Tensor:
        with self._lock:
            if self._pixels is None:
                self._pixels = self._read()
            return self._pixels
