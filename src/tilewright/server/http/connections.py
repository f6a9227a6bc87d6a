"""Limits on connections: their number, the size of a request's head, the time to send it and to read the answer.

uvicorn has none of these limits with httptools; `guard` sees a request when its head is complete.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import resource
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tilewright.server.http.errors import ApiError
from tilewright.server.http.log import access_log
from tilewright.server.http.metrics import Metrics
from tilewright.server.http.settings import ServerSettings

_log = logging.getLogger(__name__)

# 4,096 connections take a few hundred MB if each sends the longest head.
MOST_CONNECTIONS = 4096
# Open files other than clients' connections: the engine's socket, media that are fetched or read, libraries.
RESERVED_FILES = 192
LOG_EVERY_S = 10.0  # thousands of refused connections per second must not fill the disk


class ConnectionLimit:
    """Counts open connections, in total and per address."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        limit = settings.max_connections or default_max_connections()
        self.max_connections = limit
        # Half, so that one address cannot use them all. Behind a proxy all clients have its address.
        self.max_per_address = settings.max_connections_per_address or max(1, limit // 2)
        self.num_connections = 0
        self.num_lingering = 0  # refused and not yet closed
        self._num_of: Counter[str] = Counter()
        self._metrics = metrics
        self._num_refused = 0  # not yet logged
        self._log_timer: asyncio.TimerHandle | None = None

    def enter(self, address: str) -> None:
        """Count a connection; raise ApiError if there are too many."""
        if self.num_connections >= self.max_connections:
            message = f"{self.num_connections} connections are open"
            self._refuse(503, f"{message}, the limit is {self.max_connections}", address)
        if self._num_of[address] >= self.max_per_address:
            message = f"{self._num_of[address]} connections from this address are open"
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
            _log.warning("a connection from %s was refused: %s", address, message)
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
    """Return MOST_CONNECTIONS, or fewer if the limit on open files requires."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, max_files - min(RESERVED_FILES, max_files // 2)))


MAX_HEAD_BYTES = 1 << 16  # request line and all headers; cookies and tokens of browsers and proxies reach 16 KiB
MAX_HEADERS = 100
MAX_LINE_BYTES = 1 << 14  # one header, or the request's path
LINGER_S = 1.0  # to let the client read the error: a client cut off while it sends does not see it
MAX_LINGERING = 64


class Connection(HttpToolsProtocol):
    """A client's connection. After a refused request it sends an error in OpenAI's form, then closes."""

    def __init__(self, *args: Any, settings: ServerSettings, limit: ConnectionLimit, **named: Any) -> None:
        super().__init__(*args, **named)
        self._settings = settings
        self._limit = limit
        self._address: str | None = None  # set once the limit counts it
        self._is_reading_head = True  # or waiting for one
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._is_lingering = False
        self._is_deaf = False  # further data of the client is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        try:
            self._limit.enter(address)
        except ApiError as error:
            self._refuse(error, is_logged=False)
        else:
            self._address = address
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timers()
        if self._address is not None:
            self._limit.leave(self._address)
            self._address = None
        self._limit.num_lingering -= self._is_lingering
        self._is_lingering = False

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        if self._is_reading_head and self._head_timer is None:
            self._start_head_timer()
        while data and not self._is_deaf and not self.transport.is_closing():
            # A head is parsed up to its limit, a body as a whole.
            size = MAX_HEAD_BYTES - self._head_bytes if self._is_reading_head else len(data)
            if size <= 0:
                self._refuse(
                    _too_large(f"the head has {self._head_bytes} bytes or more, the limit is {MAX_HEAD_BYTES}")
                )
                return
            if self._is_reading_head:
                self._head_bytes += min(size, len(data))
            self._parse(data[:size])
            data = data[size:]

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No other protocol is supported: answer as HTTP, and read nothing after this request.
            self.cycle.keep_alive = False
        except httptools.HttpParserError as error:
            reason = "" if isinstance(error, httptools.HttpParserCallbackError) else f": {str(error)[:100]}"
            self._refuse(self._refusal or _invalid(f"the request is not HTTP/1.1{reason}"))

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_LINE_BYTES:
            message = f"the address has {len(self.url)} bytes or more, the limit is {MAX_LINE_BYTES}"
            self._stop_parsing(ApiError(414, message, code="address_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(name) + len(value) > MAX_LINE_BYTES:
            message = f"a header has {len(name) + len(value)} bytes, the limit is {MAX_LINE_BYTES}"
            self._stop_parsing(_too_large(message))
        if len(self.headers) > MAX_HEADERS:
            self._stop_parsing(_too_large(f"there are more than {MAX_HEADERS} headers, the limit"))

    def on_headers_complete(self) -> None:
        try:
            _check_head(self.headers, self.url, self.parser.get_http_version())
        except ApiError as error:
            self._stop_parsing(error)
        super().on_headers_complete()
        self._is_reading_head = False
        self._stop_head_timer()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_reading_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A later request on the connection is another cycle, which begins after this request's whole body.
        if self.cycle.response_complete and self.cycle.more_body:  # `guard` did not read to the end
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._settings.write_timeout_s, self._on_write_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._is_answering:  # a head of the next request: some clients send an empty line after each
            self._start_head_timer()
            return
        if not self._head_bytes:  # nothing was sent: no answer is expected
            self.transport.close()
            return
        message = f"the head is too slow: {self._head_bytes} bytes in {self._settings.head_timeout_s:g} s"
        self._refuse(ApiError(408, message, code="head_timeout"))

    def _on_write_timeout(self) -> None:
        _log.warning("%s has read nothing for %g s: connection closed", self.client, self._settings.write_timeout_s)
        self.transport.abort()

    def _stop_parsing(self, error: ApiError) -> None:
        """Stop httptools' parsing from within one of its callbacks."""
        self._refusal = error
        raise error

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError, *, is_logged: bool = True) -> None:
        """Send an error in answer to an incomplete request, then close."""
        self._stop_timers()
        if is_logged:
            client = self.client[0] if self.client else ""
            access_log.info(
                "request", extra={"fields": {"client": client, "status": error.status, "outcome": error.code}}
            )
        self._is_deaf = True
        if self.pipeline:
            self.transport.close()
            return
        if self._is_answering and self._is_reading_head:
            self.cycle.keep_alive = False  # the previous request is being answered: close after it
            return
        if not (self._is_answering and self.cycle.response_started):
            body = json.dumps(error.body()).encode()
            headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
            lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **error.headers}.items()]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        if self._is_answering:  # the body is malformed: tell the application that the client has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        """Close when the client does, or after LINGER_S; drop what it sends until then."""
        if self._limit.num_lingering >= MAX_LINGERING:
            self.transport.close()
            return
        self._is_lingering = True
        self._limit.num_lingering += 1
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _check_head(headers: Sequence[tuple[bytes, bytes]], target: bytes, version: str) -> None:
    """Raise a 400 for a head that a proxy could parse as a different request (RFC 9112, 3.2 and 6.1).

    httptools refuses the rest: two Content-Length, one beside Transfer-Encoding, odd line ends and spaces.
    """
    if version not in ("1.0", "1.1"):
        raise _invalid(f"the request is HTTP/{version}, expected HTTP/1.1")
    hosts = [value.lower() for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _invalid(f"the request has {len(hosts)} Host headers, expected one")
    encodings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if encodings and (version == "1.0" or encodings != [b"chunked"]):
        given = b", ".join(encodings).decode("latin-1")
        raise _invalid(f"Transfer-Encoding is {given!r:.60} in HTTP/{version}, expected chunked in HTTP/1.1")
    absolute = re.match(rb"https?://([^/?#]*)/", target.lower())
    if not target.startswith(b"/") and (absolute is None or [absolute[1]] != hosts):
        given = target.decode("latin-1")
        raise _invalid(f"the request's target is {given!r:.100}, expected a path, or a URL with the name in Host")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_http")


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def server_config(app: ASGIApp, settings: ServerSettings, metrics: Metrics, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration, with Connections that share one ConnectionLimit."""
    limit = ConnectionLimit(settings, metrics)
    protocol = cast("type[asyncio.Protocol]", functools.partial(Connection, settings=settings, limit=limit))
    return uvicorn.Config(
        cast(Any, app), http=protocol, log_config=None, access_log=False, lifespan="off", ws="none",
        server_header=False, proxy_headers=False, 
        timeout_keep_alive=cast(int, settings.idle_timeout_s), **options,
    )  # fmt: skip
