"""A setting that code below reads without being handed it, one for each thread: how a model is being built."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadSetting(threading.local, Generic[T]):
    """What `make_default` gives, unless within `use`."""

    def __init__(self, make_default: Callable[[], T]) -> None:  # called again on each thread that reads it
        self._value = make_default()

    def current(self) -> T:
        return self._value

    @contextlib.contextmanager
    def use(self, value: T) -> Iterator[T]:
        before, self._value = self._value, value
        try:
            yield value
        finally:
            self._value = before
