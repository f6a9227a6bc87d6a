"""Errors of the HTTP client."""

from __future__ import annotations


class HttpError(Exception):
    """There is no complete response; `kind` is the reason in a word."""

    kind = "error"


class ConnectError(HttpError):
    """No connection could be made, or its TLS handshake failed."""

    kind = "connect"


class ConnectionLost(HttpError):
    """The server closed the connection before its answer was complete."""

    kind = "closed"


class MalformedAnswer(HttpError):
    """The answer is not HTTP/1.1."""

    kind = "malformed"
