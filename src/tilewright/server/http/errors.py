"""Errors in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tilewright.server.api.bodies import ChatBody, CompletionBody, ResponsesBody
from tilewright.server.link.backend import EngineFailure
from tilewright.types import EngineUnavailable, RequestError

RETRY_AFTER_S = 5  # while an engine starts
# Names of a union's members, which Pydantic puts into the path of an error.
_TYPE_NAME = re.compile(
    r"str|int|float|bool|constrained-str|list\[.*\]|literal\[.*\]|dict\[.*\]|function-after\[.*\]|[A-Z]\w*"
)


class ApiError(Exception):
    """An error response: its status, and the fields that OpenAI's clients read."""

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


# Without "audio": messages that begin with it are about a medium, "audio 1".
_FIELDS = frozenset(
    name for body in (ChatBody, CompletionBody, ResponsesBody) for name in body.model_fields if name != "audio"
)


def as_api_error(error: Exception) -> ApiError:
    """Return the ApiError for any error of a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return validation_error(error.errors())
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=param_of(error), code=error.code)
    if isinstance(error, EngineUnavailable):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), kind="server_error", code=error.code, headers=headers)
    if isinstance(error, EngineFailure):
        return ApiError(500, str(error), kind="server_error", code="engine_failed")
    # The text of an unexpected error goes to the log only: it could expose internals.
    message = "internal server error; the server's log has the reason"
    return ApiError(500, message, kind="server_error", code="internal_error")


def param_of(error: RequestError) -> str | None:
    """Return the wrong field: the error's `param`, or the field name that its message begins with."""
    if error.param is not None:
        return error.param
    name = re.match(r"\w*", str(error))
    return name[0] if name and name[0] in _FIELDS else None


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for the first field that Pydantic rejects."""
    first = _most_specific(errors)
    if first["type"] == "missing" and tuple(first["loc"]) == ("body",):
        return ApiError(400, "the body is empty, expected a JSON object")
    path = [str(name) for name in first["loc"] if name != "body" and not _TYPE_NAME.fullmatch(str(name))]
    if (field := first.get("ctx", {}).get("field")) is not None:  # an undeclared field
        return ApiError(400, ".".join([*path, first["msg"]]), param=[*path, field][0], code=first["type"])
    name = ".".join(path)
    given = first.get("input")
    shown = f" is {given!r:.60}" if isinstance(given, str | int | float | bool) else ""
    message = f"{name}{shown}: {first['msg']}" if name else f"the body: {first['msg']}"
    is_other_type = _is_other_type(first)
    if is_other_type and shown:
        message += "; a value of another type is not converted"
    return ApiError(400, message, param=path[0] if path else None, code="invalid_type" if is_other_type else None)


def _most_specific(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the most specific error of the first wrong field: Pydantic lists one for every member of a union.

    An error about a limit comes before one about the type, and a deeper path before a shorter one.
    """

    def field_of(error: Mapping[str, Any]) -> object:
        return next((name for name in error["loc"] if name != "body"), None)

    of_first = [error for error in errors if field_of(error) == field_of(errors[0])]
    return min(of_first, key=lambda error: (_is_other_type(error), -len(error["loc"])))


def _is_other_type(error: Mapping[str, Any]) -> bool:
    return error["type"].endswith("_type")
