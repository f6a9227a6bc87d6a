"""Errors in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tilewright.server.backend import EngineFailure, EngineUnavailable
from tilewright.types import RequestError

RETRY_AFTER_S = 5  # while an engine is being started
# What Pydantic puts into the path of an error for the member of a union it tried.
_TYPE_NAME = re.compile(r"str|int|float|bool|constrained-str|list\[.*\]|literal\[.*\]|dict\[.*\]|[A-Z]\w*")


class ApiError(Exception):
    """An answer that is an error: a status, and what OpenAI's clients read beside it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """The ApiError that tells of what went wrong with a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return validation_error(error.errors())
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code=error.code)
    if isinstance(error, EngineUnavailable):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), kind="server_error", code="engine_unavailable", headers=headers)
    if isinstance(error, EngineFailure):
        return ApiError(500, str(error), kind="server_error", code="engine_failed")
    # What is not foreseen tells nothing of the inside; the log has it.
    return ApiError(500, "the server ran into an error of its own", kind="server_error", code="internal_error")


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing Pydantic found wrong with a body, by name. It lists every member of a union that did not fit."""
    first = errors[0]
    path = [str(name) for name in first["loc"] if name != "body" and not _TYPE_NAME.fullmatch(str(name))]
    name = ".".join(path)
    given = first.get("input")
    shown = f" is {given!r:.60}" if isinstance(given, str | int | float | bool) else ""
    message = f"{name}{shown}: {first['msg']}" if name else f"the body: {first['msg']}"
    return ApiError(400, message, param=path[0] if path else None)
