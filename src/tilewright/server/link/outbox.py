"""Collects the events of a step, so that one message carries those of all requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tilewright.server.link.backend import Event

Post = list[tuple[str, Event]]  # (request id, event)


class Outbox:
    """Events that wait for `flush`. Thread-safe; keeps the order of each request's events."""

    def __init__(self, send: Callable[[Post], object]) -> None:
        self._send = send
        self._events: Post = []
        self._lock = threading.Lock()

    def put(self, request_id: str, event: Event) -> None:
        with self._lock:
            self._events.append((request_id, event))

    def flush(self) -> None:
        """Sends the events that were put, if any."""
        with self._lock:  # held while sending: later events must not overtake
            events, self._events = self._events, []
            if events:
                self._send(events)
