"""Bodies of requests parsed as JSON, and not kept afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

# Both parsers hold the interpreter lock, so a thread would not help: 20 MB take `json` 117 ms, pydantic's 13 ms.
LARGE_BODY_BYTES = 1 << 20


def parse_json(body: bytes) -> Any:
    """What `json.loads` returns or raises, sooner for large bodies."""
    if len(body) >= LARGE_BODY_BYTES:
        try:
            return pydantic_core.from_json(body)
        except ValueError:  # malformed, deeply nested, or with what only `json` takes: half a surrogate pair, UTF-16
            pass
    return json.loads(body)


class JsonRequest(Request):
    """A request whose body is parsed once. Starlette's own would keep text and values until the answer ends."""

    _text = b""

    async def body(self) -> bytes:
        self._text = b"".join([piece async for piece in self.stream()])
        return self._text

    async def json(self) -> Any:
        """The values of the body, which was read by `body` before."""
        text, self._text = self._text, b""
        return parse_json(text)


class JsonRoute(APIRoute):
    """A route whose endpoint gets a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
