"""The HTTP application: its routes and error handlers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from tilewright import __version__
from tilewright.server.api.bodies import ChatBody, CompletionBody, ResponsesBody
from tilewright.server.api.handler import ApiHandler
from tilewright.server.api.images.handler import add_routes as add_image_routes
from tilewright.server.api.speech import SpeechBody
from tilewright.server.api.transcriptions import FILE, TranscriptionBody, TranslationBody, read_form
from tilewright.server.http.bodies import BodyError, JsonResponse, JsonRoute
from tilewright.server.http.errors import ApiError, as_api_error, validation_error
from tilewright.server.http.guard import Guard
from tilewright.server.http.page_files import page_response
from tilewright.server.link.backend import EngineFailure
from tilewright.types import EngineUnavailable, RequestError

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, description in {
        400: "The request is invalid or not supported",
        401: "The API key is missing or wrong",
        404: "The model does not exist",
        413: "The body is too large",
        429: "The queue is full",
        503: "The engine is starting",
        504: "The answer took longer than the timeout",
    }.items()
}


def create_app(handler: ApiHandler) -> Guard:
    """Return the ASGI application."""
    app = FastAPI(
        title="Tilewright",
        version=__version__,
        docs_url=None,  # its page loads scripts from other sites
        redoc_url=None,
        responses=_ERRORS,
        # Newer versions can export request data if environment variables say so; older ones ignore this.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.router.route_class = JsonRoute
    _add_routes(app, handler)
    add_image_routes(app, handler.diffusion)
    _add_error_handlers(app)
    _describe(app)
    return Guard(app, handler.settings, handler.metrics)


def _add_routes(app: FastAPI, handler: ApiHandler) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation: one object or, with `stream`, events."""
        return await handler.answer(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue prompts: a text, token ids, or a list of either."""
        return await handler.answer(body, request)

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation in OpenAI's Responses interface."""
        return await handler.answer(body, request)

    @app.post("/v1/audio/speech")
    async def speech(body: SpeechBody, request: Request) -> Response:
        """Speak a text: a sound file or, with `stream_format` sse, events."""
        return await handler.answer(body, request)

    @app.post("/v1/audio/transcriptions", openapi_extra=_form(TranscriptionBody))
    async def transcriptions(request: Request) -> Response:
        """Transcribe the speech in a sound file; with `stream`, as events."""
        return await handler.answer(await read_form(TranscriptionBody, request), request)

    @app.post("/v1/audio/translations", openapi_extra=_form(TranslationBody))
    async def translations(request: Request) -> Response:
        """Translate the speech in a sound file into English text."""
        return await handler.answer(await read_form(TranslationBody, request), request)

    @app.get("/v1/models")
    async def models() -> Response:
        """List the served models."""
        return JsonResponse({"object": "list", "data": handler.model_objects()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return the entry of one model."""
        return JsonResponse(handler.model_object(name))

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        """Return a file of the web page, which chats with the model."""
        return page_response(request)

    @app.get("/health")
    async def health() -> Response:
        """Return 200 if a request would be answered now, 503 otherwise."""
        return await handler.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return await handler.metrics_text()

    @app.get("/version")
    async def version() -> Response:
        """Return the version of this server."""
        return JsonResponse({"version": __version__})


def _form(kind: type[TranscriptionBody]) -> dict[str, Any]:
    """Return the OpenAPI schema of a form with a file."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    fields = {name: field for name, field in schema["properties"].items() if name != "data"}
    form = {**schema, "properties": {**fields, FILE: {"type": "string", "format": "binary"}}, "required": [FILE]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        known = as_api_error(error)
        request.state.log.fail(known, error)
        return JsonResponse(known.body(), known.status, known.headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        content_type = request.headers.get("content-type", "")
        # FastAPI does not parse bodies of other types: the error would say that the body is not an object.
        if error.body is not None and not isinstance(error.body, dict | list) and not _is_json(content_type):
            message = f"the content type is {content_type[:100]!r}, expected application/json"
            return await answer(request, ApiError(400, message))
        return await answer(request, validation_error(error.errors()))

    async def plain_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, BodyError):
            return await answer(request, error.error)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path[:200]} on this server"
        return await answer(request, ApiError(error.status_code, message, headers=error.headers))

    for kind in (ApiError, RequestError, EngineUnavailable, EngineFailure, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain_http)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _describe(app: FastAPI) -> None:
    """Put this server's errors into the OpenAPI document, in OpenAI's form and without status 422."""
    fields: dict[str, Any] = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    error = {"type": "object", "properties": fields, "required": list(fields)}
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
