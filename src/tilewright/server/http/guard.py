"""Middleware around all requests: checks host names, origins and API keys, bounds bodies, logs one line per request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.server.api.images.jobs import RESULT_PATH
from tilewright.server.http.admission import MemoryBudget, MemoryReservation
from tilewright.server.http.bodies import BoundedBody, JsonResponse
from tilewright.server.http.errors import ApiError, as_api_error
from tilewright.server.http.log import RequestLog
from tilewright.server.http.metrics import Metrics
from tilewright.server.http.page_files import PAGE_FILES
from tilewright.server.http.respond import shutting_down
from tilewright.server.http.settings import ServerSettings

_OPEN_PATHS = ("/health", "/version")  # for monitors without a key
NO_STATUS = 499  # the client left before a status was sent; nginx uses the same number
MAX_LOGGED_PATH = 200  # characters of an unknown path
_VIDEOS = "/v1/videos/"
_COUNTED_PATTERNS = (_VIDEOS, RESULT_PATH)
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: FastAPI, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self.openapi = app.openapi
        # For requests from pages at these origins: outermost, so that a page can read why it was refused.
        self._allowing: ASGIApp = CORSMiddleware(
            self._guard, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
        self._settings = settings
        self._metrics = metrics
        # Known paths, those with an id by their pattern; all others are counted as one.
        routes = [route for route in app.routes if isinstance(route, Route)]
        self._paths = frozenset(route.path for route in routes)
        self._patterns = [
            (route.path_regex, route.path) for route in routes if route.path.startswith(_COUNTED_PATTERNS)
        ]
        self._open_paths = {*_OPEN_PATHS, *PAGE_FILES}  # the page asks its user for the key
        self._memory = MemoryBudget(settings.max_held_bytes)
        # Digests have one length: comparing them takes the same time for any key.
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._is_allowed_origin(Headers(scope=scope)):
            await self._allowing(scope, receive, send)
        else:
            await self._guard(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        path = self._counted_path(scope["path"])
        client = (scope.get("client") or ("", 0))[0]
        log = RequestLog(self._metrics, request_id, scope["method"], path or "other", client)
        if path is None or path.startswith(_VIDEOS):
            log.fields["path"] = scope["path"][:MAX_LOGGED_PATH]
        scope.setdefault("state", {})["log"] = log
        status = NO_STATUS
        is_held_open = False
        reservation = scope["state"]["reservation"] = MemoryReservation(self._memory)
        body = BoundedBody(receive, self._settings, reservation, headers)

        async def noting_send(message: Message) -> None:
            nonlocal status, is_held_open
            if message["type"] == "http.response.start":
                status = message["status"]
                answer_headers = MutableHeaders(scope=message)
                answer_headers["x-request-id"] = request_id
                if not body.is_complete and not body.can_be_discarded:
                    answer_headers["connection"] = "close"
            elif not message.get("more_body", False) and not body.is_complete:
                # The whole answer is sent but not ended: at its end uvicorn would close the connection.
                is_held_open = True
                message = {**message, "more_body": True}
            await send(message)

        try:
            self._check(scope, headers)
            body.check_declared()
            # HEAD is answered as a GET; uvicorn, which has its own scope, omits the body.
            is_head = scope["method"] == "HEAD"
            await self._app({**scope, "method": "GET"} if is_head else scope, body.receive, noting_send)
        except ApiError as error:
            log.fail(error, error)
            await JsonResponse(error.body(), error.status, error.headers)(scope, receive, noting_send)
        except asyncio.CancelledError:  # the server shuts down; nothing awaits this task
            log.outcome = shutting_down().code or ""
            body.is_complete = True  # do not wait for the rest
            if status == NO_STATUS:
                await JsonResponse(shutting_down().body(), shutting_down().status)(scope, receive, noting_send)
        except Exception as error:  # the application has answered the client already
            if log.outcome == "ok":
                log.fail(as_api_error(error), error)
        finally:
            reservation.release()
            log.close(status)
        if is_held_open:
            with contextlib.suppress(asyncio.CancelledError):  # the server shuts down
                await body.discard()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _counted_path(self, path: str) -> str | None:
        """Return the path to count a request under; None for unknown paths, which are counted together."""
        if path in self._paths:
            return path
        if path in PAGE_FILES:
            return "/"
        return next((pattern for regex, pattern in self._patterns if regex.match(path)), None)

    def _is_open(self, path: str) -> bool:
        """Return whether the path needs no key. A result's name cannot be guessed, like a key."""
        return path in self._open_paths or path.startswith(RESULT_PATH)

    def _check(self, scope: Scope, headers: Headers) -> None:
        self._check_host(headers)
        self._check_origin(scope, headers)
        if self._key_digests and not self._is_open(scope["path"]) and scope["method"] != "OPTIONS":
            self._check_key(headers)

    def _check_host(self, headers: Headers) -> None:
        """Raise a 403 for another host name: of a web page whose name resolves to this address (DNS rebinding)."""
        if "host" not in headers:  # HTTP/1.0, which no browser sends
            return
        allowed, name = self._settings.allowed_hosts, host_name(headers["host"])
        if allowed and name not in allowed and not is_loopback(name):
            message = f"the server does not answer to the name {name[:100]!r}; --allowed-host allows it"
            raise ApiError(403, message, code="host_not_allowed")

    def _is_allowed_origin(self, headers: Headers) -> bool:
        """Return whether the request comes from a page at an origin of `--cors-origin`."""
        origins, allowed = headers.getlist("origin"), self._settings.cors_origins
        return len(origins) == 1 and ("*" in allowed or origins[0] in allowed)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Raise a 403 for requests from a page of another origin, whether or not the page could read the answer.

        Browsers send `Sec-Fetch-Site`, or only `Origin`: old ones, and all to an address without TLS that is not
        loopback. Other clients send neither.
        """
        if "*" in self._settings.cors_origins or self._is_allowed_origin(headers):
            return
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site")
        origin = origins[0] if origins else "another origin"
        if not origins:
            is_own = site in (None, "same-origin", "none") or _is_link(scope, headers)
        elif len(origins) > 1 or origin == "null":  # null: a sandboxed frame, a file, a redirection
            is_own = False
        else:
            is_own = site == "same-origin" or (site in (None, "none") and has_host(origin, headers.get("host", "")))
        if not is_own:
            message = f"requests from a page at {origin[:100]} are refused; --cors-origin allows an origin"
            raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            raise ApiError(
                401, message, code="invalid_api_key", kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip


def _is_link(scope: Scope, headers: Headers) -> bool:
    """Return whether the request opens a page by a link or loads a result: neither computes anything."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    is_document = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return is_document or scope["path"].startswith(RESULT_PATH)


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port and the dot that ends an absolute name."""
    return re.sub(r":\d*$", "", host).lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    """Return whether a host name always resolves to this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def has_host(origin: str, host: str) -> bool:
    """Return whether an Origin header has the name and port of a Host header.

    The scheme may differ: behind a proxy with TLS the page has https, and this server http.
    """
    match = re.fullmatch(r"(https?)://([^/?#@]+)", origin.lower())
    if match is None:
        return False
    default = "443" if match[1] == "https" else "80"
    return _name_and_port(match[2], default) == _name_and_port(host, default)


def _name_and_port(host: str, default: str) -> tuple[str, str]:
    port = re.search(r":(\d+)$", host)
    return host_name(host), port[1] if port else default
