"""The addresses of pictures and videos."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tilewright.server.json_text import JsonResponse
from tilewright.server.pictures.bodies import EditBody, ImageBody, VideoBody
from tilewright.server.pictures.handler import PictureHandler
from tilewright.server.pictures.results import RESULT_PATH


def _json_or_form(kind: type[EditBody] | type[VideoBody], file_field: str) -> dict[str, Any]:
    """For the OpenAPI document: a body that is JSON or a form with a file."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {**schema["properties"], file_field: {"type": "string", "format": "binary"}}
    form = {**schema, "properties": properties}
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


def add_routes(app: FastAPI, handler: PictureHandler) -> None:
    @app.post("/v1/images/generations")
    async def generate(body: ImageBody, request: Request) -> Response:
        """Pictures of a prompt, as one object or, with `stream`, as events."""
        return await handler.generate(body, request)

    @app.post("/v1/images/edits", openapi_extra=_json_or_form(EditBody, "image"))
    async def edit(request: Request) -> Response:
        """A picture made of another one and a prompt."""
        return await handler.edit(request)

    @app.post("/v1/videos", openapi_extra=_json_or_form(VideoBody, "input_reference"))
    async def create_video(request: Request) -> Response:
        """A job that makes a video."""
        return await handler.create_video(request)

    @app.get("/v1/videos")
    async def list_videos(after: str | None = None, limit: int = 20, order: str = "desc") -> Response:
        """The jobs that this server remembers."""
        return handler.list_videos(after, limit, order)

    @app.get("/v1/videos/{video_id}")
    async def video(video_id: str) -> Response:
        """A job: its status and progress."""
        return JsonResponse(handler.videos.get(video_id).as_object())

    @app.get("/v1/videos/{video_id}/content")
    async def content(video_id: str, variant: str = "video") -> Response:
        """The file of a video that is made."""
        return handler.video_content(video_id, variant)

    @app.delete("/v1/videos/{video_id}")
    async def delete_video(video_id: str) -> Response:
        """Forgets a video; one that is being made is cancelled."""
        return handler.delete_video(video_id)

    @app.get(RESULT_PATH + "{name}", include_in_schema=False)
    async def result(name: str) -> Response:
        """A picture that was given by URL."""
        return handler.result(name)
