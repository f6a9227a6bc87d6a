"""Bodies of requests parsed as JSON, and not kept afterwards."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from tilewright.inputs.client_json import parse_json
from tilewright.server.bounded_body import BodyError
from tilewright.server.errors import as_api_error
from tilewright.types import RequestError


class JsonRequest(Request):
    """A request whose body is parsed once. Starlette's own would keep text and values until the answer ends."""

    _text = b""

    async def body(self) -> bytes:
        self._text = b"".join([piece async for piece in self.stream()])
        return self._text

    async def json(self) -> Any:
        """The values of the body, which was read by `body` before."""
        text, self._text = self._text, b""
        try:
            return parse_json(text, "the body")
        except RequestError as error:
            raise BodyError(as_api_error(error)) from None


class JsonRoute(APIRoute):
    """A route whose endpoint gets a JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
