"""How much of what clients sent, and of what was fetched for them, is in memory."""

from __future__ import annotations

from tilewright.server.errors import ApiError


class MemoryBudget:
    """Bytes of all requests under way, within a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size_bytes = 0


class MemoryReservation:
    """What one request holds of them; given back when it is answered."""

    def __init__(self, held: MemoryBudget) -> None:
        self._held = held
        self._size_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes before they are kept; 429 where all requests together have too many."""
        self._size_bytes += num_bytes
        self._held.size_bytes += num_bytes
        if self._held.size_bytes > self._held.limit:
            message = f"requests under way hold {self._held.size_bytes} bytes, the limit is {self._held.limit}"
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(429, message, kind="rate_limit_error", code="memory_full", headers=headers)

    def release(self) -> None:
        self._held.size_bytes -= self._size_bytes
        self._size_bytes = 0
