"""Why an HTTP request had no whole answer."""

from __future__ import annotations


class HttpError(Exception):
    """No whole answer came; `kind` says why in a word."""

    kind = "error"


class ConnectError(HttpError):
    """Nobody answered, or TLS could not be agreed upon."""

    kind = "connect"


class ConnectionLost(HttpError):
    """The server closed the connection before its answer was complete."""

    kind = "closed"


class MalformedAnswer(HttpError):
    """The answer is not HTTP/1.1."""

    kind = "malformed"
