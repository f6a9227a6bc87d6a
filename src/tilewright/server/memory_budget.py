"""Memory for the bodies of requests under way and for their media."""

from __future__ import annotations

from tilewright.server.errors import ApiError


class MemoryBudget:
    """Bytes reserved by all requests under way, and their limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size_bytes = 0


class MemoryReservation:
    """The part of the budget that one request holds; released when it is answered."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._size_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Reserves bytes before they are kept, or gives some back if negative; 429 when the budget is used up."""
        self._size_bytes += num_bytes
        self._budget.size_bytes += num_bytes
        if self._budget.size_bytes > self._budget.limit:
            message = f"requests under way hold {self._budget.size_bytes} bytes, the limit is {self._budget.limit}"
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(429, message, kind="rate_limit_error", code="memory_full", headers=headers)

    def hand_over(self, num_bytes: int) -> MemoryReservation:
        """Another reservation that holds so many of these bytes, and may outlive the request."""
        other = MemoryReservation(self._budget)
        other._size_bytes = min(num_bytes, self._size_bytes)
        self._size_bytes -= other._size_bytes
        return other

    def release(self) -> None:
        self._budget.size_bytes -= self._size_bytes
        self._size_bytes = 0
