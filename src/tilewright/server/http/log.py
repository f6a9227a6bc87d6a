"""Logs one line per request, and counts requests in the metrics."""

from __future__ import annotations

import logging
import time
from typing import Any

from tilewright.server.http.errors import ApiError
from tilewright.server.http.metrics import Metrics
from tilewright.server.link.backend import AnswerDelta, Ended, Started

_QUIET_PATHS = ("/health", "/metrics", "/")  # requested every few seconds by monitors; the page has many files
access_log = logging.getLogger("tilewright.access")


class RequestLog:
    """Collects the fields of a request's log line while it is answered."""

    def __init__(self, metrics: Metrics, request_id: str, method: str, path: str, client: str) -> None:
        self._metrics = metrics
        self._began_s = time.perf_counter()
        self._last_token_s: float | None = None
        self.request_id = request_id
        self.path = path
        self.outcome = "ok"
        self.fields: dict[str, Any] = {"id": request_id, "client": client, "method": method, "path": path}

    def record(self, event: Started | AnswerDelta | Ended) -> None:
        """Record an event of the engine."""
        if isinstance(event, AnswerDelta):
            self._record_tokens(event.num_tokens)
        elif isinstance(event, Ended):
            self._metrics.count_tokens(event)
            self.add(prompt_tokens=event.num_prompt_tokens, cached_tokens=event.num_cached_tokens)
            self.add(output_tokens=event.num_output_tokens)

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self.fields[name] = self.fields.get(name, 0) + count

    def fail(self, known: ApiError, error: Exception) -> None:
        """Record an error; log an internal one with its traceback.

        Messages of other errors are not logged: they quote the request.
        """
        self.outcome = known.code or known.kind
        if known.param:
            self.fields["param"] = known.param
        if known.status >= 500 and known.code == "internal_error":
            logging.getLogger(__name__).error("%s: %s failed", self.request_id, self.path, exc_info=error)

    def close(self, status: int) -> None:
        """Write the line."""
        total_s = time.perf_counter() - self._began_s
        self._metrics.count_request(self.path, status, total_s)
        self.fields |= {"status": status, "total_s": round(total_s, 4)}
        if self.outcome != "ok":
            self.fields["outcome"] = self.outcome
        level = logging.DEBUG if self.path in _QUIET_PATHS and status in (200, 304) else logging.INFO
        access_log.log(level, "request", extra={"fields": self.fields})

    def _record_tokens(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._last_token_s is None:
            self.fields["ttft_s"] = round(now - self._began_s, 4)
            self._metrics.first_token.observe(now - self._began_s)
        elif num_tokens:
            # Tokens that arrive together, such as accepted drafts, share the gap.
            for _ in range(num_tokens):
                self._metrics.between_tokens.observe((now - self._last_token_s) / num_tokens)
        self._last_token_s = now
