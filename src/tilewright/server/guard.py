"""Middleware around all requests: checks host names and API keys, bounds bodies, logs a line at the end."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.server.bounded_body import BoundedBody, body_too_long
from tilewright.server.errors import ApiError, as_api_error
from tilewright.server.json_text import JsonResponse
from tilewright.server.memory_budget import MemoryBudget, MemoryReservation
from tilewright.server.metrics import Metrics
from tilewright.server.multipart import is_multipart
from tilewright.server.page_files import PAGE_FILES
from tilewright.server.pictures.results import RESULT_PATH
from tilewright.server.request_log import RequestLog
from tilewright.server.respond import shutting_down
from tilewright.server.settings import ServerSettings

_OPEN_PATHS = ("/health", "/version")  # for monitors that have no key
NO_STATUS = 499  # the client left before a status was sent; nginx has the same number
MAX_LOGGED_PATH = 200  # characters of an address that does not exist
_VIDEOS = "/v1/videos/"
_COUNTED_PATTERNS = (_VIDEOS, RESULT_PATH)
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: FastAPI, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self.openapi = app.openapi
        self._entry: ASGIApp = self._guard
        if settings.cors_origins:  # outermost, so that a page can read why it was refused
            self._entry = CORSMiddleware(
                self._guard, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
            )  # fmt: skip
        self._settings = settings
        self._metrics = metrics
        # Existing paths, those with an id by their pattern; all others are counted as one.
        routes = [route for route in app.routes if isinstance(route, Route)]
        self._paths = frozenset(route.path for route in routes)
        self._patterns = [
            (route.path_regex, route.path) for route in routes if route.path.startswith(_COUNTED_PATTERNS)
        ]
        self._open_paths = {*_OPEN_PATHS, *PAGE_FILES}  # the page asks its user for the key
        self._memory = MemoryBudget(settings.max_held_bytes)
        # Digests have one length: comparing them takes the same time whatever was sent.
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entry if scope["type"] == "http" else self._app)(scope, receive, send)

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

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        reservation = scope["state"]["reservation"] = MemoryReservation(self._memory)
        is_form = is_multipart(headers.get("content-type", ""))
        body = BoundedBody(receive, self._settings, reservation, is_form=is_form)
        try:
            self._check(scope, headers)
            # Answered as a GET; uvicorn, which keeps its own scope, leaves the body out.
            is_head = scope["method"] == "HEAD"
            await self._app({**scope, "method": "GET"} if is_head else scope, body.receive, noting_send)
        except ApiError as error:
            log.fail(error, error)
            await body.discard()
            await JsonResponse(error.body(), error.status, error.headers)(scope, receive, noting_send)
        except asyncio.CancelledError:  # the server shuts down; nothing awaits this task
            log.outcome = shutting_down().code or ""
            if status == NO_STATUS:
                await JsonResponse(shutting_down().body(), shutting_down().status)(scope, receive, noting_send)
        except Exception as error:  # the application has answered the client already
            if log.outcome == "ok":
                log.fail(as_api_error(error), error)
        finally:
            reservation.release()
            log.close(status)

    def _counted_path(self, path: str) -> str | None:
        """The path that a request is counted as; None: one of those that are counted together."""
        if path in self._paths:
            return path
        if path in PAGE_FILES:
            return "/"
        return next((pattern for regex, pattern in self._patterns if regex.match(path)), None)

    def _is_open(self, path: str) -> bool:
        """Whether it needs no key. The name of a result is as good as one."""
        return path in self._open_paths or path.startswith(RESULT_PATH)

    def _check(self, scope: Scope, headers: Headers) -> None:
        settings = self._settings
        host = re.sub(r":\d+$", "", headers.get("host", "")).lower()
        if settings.allowed_hosts and host not in settings.allowed_hosts:
            # DNS rebinding: a web page whose name points to this address would be the same origin to the browser.
            message = f"the server does not answer to the name {host[:100]!r}; --allowed-host allows it"
            raise ApiError(403, message, code="host_not_allowed")
        if self._key_digests and not self._is_open(scope["path"]) and scope["method"] != "OPTIONS":
            self._check_key(headers)
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > settings.max_body_bytes:
            raise body_too_long(int(declared), settings.max_body_bytes)

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
