"""Admission: limits on answers that run or wait, and on the memory for bodies and media of open requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tilewright.server.http.errors import ApiError
from tilewright.server.http.metrics import Metrics

MAX_WAIT_S = 120  # OpenAI's client does not retry after a longer Retry-After
_SMOOTHING = 0.2  # weight of the newest request in the mean duration


class Slot:
    """The place of an admitted request; `release` may be called more than once."""

    def __init__(self, admission: Admission, num_answers: int) -> None:
        self._admission: Admission | None = admission
        self._num_answers = num_answers
        self._began_s = time.perf_counter()

    def release(self) -> None:
        if self._admission is not None:
            self._admission.leave(self._num_answers, time.perf_counter() - self._began_s)
            self._admission = None


class Admission:
    """Counts answers that run or wait, and refuses requests when the queue is full."""

    def __init__(self, max_queue: int, metrics: Metrics) -> None:
        self._max_queue = max_queue
        self._metrics = metrics
        self._mean_s = 1.0
        self.num_answers = 0

    def enter(self, num_answers: int, max_sequences: int) -> Slot:
        """Return a Slot for `num_answers`; raise a 429 if `max_sequences` answers are running and the queue is full."""
        limit = max_sequences + self._max_queue
        if num_answers > limit:
            raise ApiError(400, f"the request wants {num_answers} answers, this server takes at most {limit} at once")
        if self.num_answers + num_answers > limit:
            self._metrics.refused.inc()
            wait_s = min(MAX_WAIT_S, max(1, math.ceil(self._mean_s * self.num_answers / max_sequences)))
            message = f"{self.num_answers} answers are in progress, the limit is {limit}; try again in {wait_s} s"
            headers = {"Retry-After": str(wait_s)}
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
        self.num_answers += num_answers
        self._metrics.in_flight.inc()
        return Slot(self, num_answers)

    def leave(self, num_answers: int, took_s: float) -> None:
        self.num_answers -= num_answers
        self._metrics.in_flight.dec()
        self._mean_s += _SMOOTHING * (took_s - self._mean_s)


class MemoryBudget:
    """Bytes reserved by all open requests, and their limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size_bytes = 0


ReserveMemory = Callable[[int], None]  # reserves bytes before they are stored, or raises; negative: releases some


class MemoryReservation:
    """The part of the budget that one request holds until it is answered."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._size_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Reserve bytes before storing them (negative: release some); raise a 429 when the budget is used up."""
        self._size_bytes += num_bytes
        self._budget.size_bytes += num_bytes
        if self._budget.size_bytes > self._budget.limit:
            message = f"requests in progress hold {self._budget.size_bytes} bytes, the limit is {self._budget.limit}"
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(429, message, kind="rate_limit_error", code="memory_full", headers=headers)

    def hand_over(self, num_bytes: int) -> MemoryReservation:
        """Move `num_bytes` of this reservation to a new one, which may outlive the request, and return it."""
        other = MemoryReservation(self._budget)
        other._size_bytes = min(num_bytes, self._size_bytes)
        self._size_bytes -= other._size_bytes
        return other

    def release(self) -> None:
        self._budget.size_bytes -= self._size_bytes
        self._size_bytes = 0
