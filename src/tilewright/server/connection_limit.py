"""How many connections may be open, in all and from one address."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter

from tilewright.server.errors import ApiError
from tilewright.server.metrics import Metrics
from tilewright.server.settings import ServerSettings

_log = logging.getLogger(__name__)

# More are not needed; 4,096 take a few hundred MB if each sends the longest head.
MOST_CONNECTIONS = 4096
# Open files beside the clients' connections: the engine's socket, media that are fetched or read, libraries.
RESERVED_FILES = 192
LOG_EVERY_S = 10.0  # thousands of refused connections a second must not fill the disk


class ConnectionLimit:
    """Counts open connections, in all and per address."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        limit = settings.max_connections or default_max_connections()
        self.max_connections = limit
        # Half, so that one address cannot use them all. Behind a proxy all clients have its address.
        self.max_per_address = settings.max_connections_per_address or max(1, limit // 2)
        self.num_connections = 0
        self.num_lingering = 0  # refused, and not closed yet
        self._num_of: Counter[str] = Counter()
        self._metrics = metrics
        self._num_refused = 0  # not logged yet
        self._log_timer: asyncio.TimerHandle | None = None

    def enter(self, address: str) -> None:
        """Counts a connection; ApiError if there are too many."""
        if self.num_connections >= self.max_connections:
            message = f"{self.num_connections} connections are open"
            self._refuse(503, f"{message}, the limit is {self.max_connections}", address)
        if self._num_of[address] >= self.max_per_address:
            message = f"{self._num_of[address]} connections of this address are open"
            self._refuse(429, f"{message}, the limit is {self.max_per_address}", address)
        self.num_connections += 1
        self._num_of[address] += 1

    def leave(self, address: str) -> None:
        self.num_connections -= 1
        self._num_of[address] -= 1
        if not self._num_of[address]:
            del self._num_of[address]

    def _refuse(self, status: int, message: str, address: str) -> None:
        self._metrics.connections_refused.inc()
        if self._log_timer is None:
            _log.warning("a connection of %s was refused: %s", address, message)
            self._log_timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._log_more)
        else:
            self._num_refused += 1
        kind = "server_error" if status == 503 else "rate_limit_error"
        raise ApiError(status, message, kind=kind, code="too_many_connections", headers={"Retry-After": "5"})

    def _log_more(self) -> None:
        if self._num_refused:
            _log.warning("%d more connections were refused in %g s", self._num_refused, LOG_EVERY_S)
        self._log_timer, self._num_refused = None, 0


def default_max_connections() -> int:
    """MOST_CONNECTIONS, or as many as the limit on open files allows."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, max_files - min(RESERVED_FILES, max_files // 2)))
