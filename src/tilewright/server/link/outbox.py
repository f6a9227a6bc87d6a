"""Events gathered over a step, so that they leave together: one message for all who are being answered."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tilewright.server.link.backend import Event

Post = list[tuple[str, Event]]  # (request id, event)


class Outbox:
    """Events that wait for `flush`. For any thread; the order of each request's events is kept."""

    def __init__(self, send: Callable[[Post], object]) -> None:
        self._send = send
        self._events: Post = []
        self._lock = threading.Lock()

    def put(self, request_id: str, event: Event) -> None:
        with self._lock:
            self._events.append((request_id, event))

    def flush(self) -> None:
        """Sends what was put, if anything was."""
        with self._lock:  # held while sending: what is put later must not overtake
            events, self._events = self._events, []
            if events:
                self._send(events)
