"""Requests for images and videos: their routes, their checks, the reading of an image, and the queue."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from tilewright.diffusion.requests import DiffusionRequest, Expectation, Progress
from tilewright.server.api.images.jobs import RESULT_PATH, ResultStore, VideoJob, VideoJobs
from tilewright.server.api.images.request import (
    DiffusionBody,
    EditBody,
    ImageBody,
    VideoBody,
    client_error,
    edit_source,
    image_request,
    read_body,
    read_image,
    reference_source,
    video_request,
)
from tilewright.server.api.images.respond import Event, ImageResponse, ImageWriter
from tilewright.server.api.served import Served
from tilewright.server.http.admission import MemoryReservation
from tilewright.server.http.bodies import JsonResponse
from tilewright.server.http.errors import ApiError
from tilewright.server.http.log import RequestLog
from tilewright.server.http.metrics import Metrics
from tilewright.server.http.respond import ShuttingDown, timed_out
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.diffusion import Cancel, DiffusionBackend, ProgressListener
from tilewright.server.media.gate import MediaGate
from tilewright.types import RequestError

MAX_LISTED = 100
_MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


class DiffusionHandler:
    """Answers requests at /v1/images and /v1/videos by the models that draw."""

    def __init__(self, settings: ServerSettings, served: Served, gate: MediaGate, metrics: Metrics) -> None:
        self._served = served
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self.results = ResultStore()
        self.videos = VideoJobs(self.results)
        self._streams: set[asyncio.Queue[Event]] = set()  # queues of open responses

    async def generate(self, body: ImageBody, request: Request) -> Response:
        backend = self._served.find_image(body.model).backend
        self._log_content(body, request)
        return await self._respond(backend, body, image_request(body), request, "image_generation")

    async def edit(self, request: Request) -> Response:
        self._served.find_image(None)  # before the body is read
        body, file = await read_body(EditBody, request, "image")
        backend = self._served.find_image(body.model).backend
        self._log_content(body, request)
        source = edit_source(body)
        if source is None and file is None:
            raise ApiError(400, "image is missing, expected an image to edit", param="image")
        if backend.limits is not None and not backend.limits.takes_image:  # before it is fetched
            raise ApiError(400, f"{backend.name} cannot edit: it makes images from text alone", param="image")
        backend.check_room()
        image = await self._read_image(source, file, "image", request)
        return await self._respond(backend, body, image_request(body, image), request, "image_edit")

    async def create_video(self, request: Request) -> Response:
        self._served.find_image(None)  # before the body is read
        body, file = await read_body(VideoBody, request, "input_reference")
        backend = self._served.find_image(body.model).backend
        self._log_content(body, request)
        backend.check_room()
        image = await self._read_image(reference_source(body), file, "input_reference", request)
        wanted = video_request(body, image)
        await backend.wait_for_limits()
        _check(backend, wanted, "input_reference")
        # No time limit: clients poll a video for as long as they want.
        expected = await backend.expect(wanted)
        # The image stays in memory after its request, until the video is done.
        reservation: MemoryReservation = request.state.reservation
        held = reservation.hand_over(len(image or b""))
        seconds = "auto" if body.seconds is None else f"{body.seconds:g}"
        job = VideoJob(backend.name, body.prompt, body.size or "auto", seconds)
        job.expected_s = None if expected is None else expected.seconds
        try:
            self.videos.create(job, partial(self._submit, backend, wanted), held.release)
        except BaseException:
            held.release()
            raise
        return JsonResponse(job.as_object())

    def list_videos(self, after: str | None, limit: int, order: str) -> Response:
        if not 1 <= limit <= MAX_LISTED:
            raise ApiError(400, f"limit is {limit}, expected 1 to {MAX_LISTED}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:40]!r}, expected asc or desc", param="order")
        jobs, has_more = self.videos.list(after, limit, order == "desc")
        data = [job.as_object() for job in jobs]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JsonResponse({"object": "list", "data": data, **ends, "has_more": has_more})

    def video_content(self, job_id: str, variant: str) -> Response:
        if variant != "video":
            raise ApiError(400, f"variant is {variant[:40]!r}, expected video", param="variant")
        result = self.videos.content(self.videos.get(job_id))
        return Response(result.data, media_type=result.media_type)

    def delete_video(self, job_id: str) -> Response:
        self.videos.delete(job_id)
        return JsonResponse({"id": job_id, "object": "video.deleted", "deleted": True})

    def result(self, name: str) -> Response:
        """Return an image that an earlier answer gave by URL."""
        found = self.results.get(name.partition(".")[0])
        if found is None:
            raise ApiError(404, "there is no such image, or it is not kept any more", code="result_expired")
        headers = {
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "default-src 'none'; sandbox",
            "Cache-Control": f"private, max-age={self.results.keep_s:.0f}, immutable",
        }
        return Response(found.data, media_type=found.media_type, headers=headers)

    def shut_down(self) -> None:
        """End all running requests with an error that says the server is shutting down."""
        for events in self._streams:
            events.put_nowait(ShuttingDown())

    async def close(self) -> None:
        self.videos.close()
        self.results.close()
        for model in self._served.image_models:
            await model.backend.close()

    async def _read_image(self, source: str | None, file: bytes | None, field: str, request: Request) -> bytes | None:
        reservation: MemoryReservation = request.state.reservation
        return await read_image(source, file, field, self._gate, reservation.add, self._settings.media.limits)

    async def _respond(
        self, backend: DiffusionBackend, body: ImageBody, wanted: DiffusionRequest, request: Request, kind: str
    ) -> Response:
        log: RequestLog = request.state.log
        log.fields["stream"] = body.stream
        timeout_s, began_s = self._settings.request_timeout_s, asyncio.get_running_loop().time()
        try:
            expected = await asyncio.wait_for(self._checked(backend, wanted), timeout_s)
        except asyncio.TimeoutError:
            raise timed_out(timeout_s) from None
        events: asyncio.Queue[Event] = asyncio.Queue()
        cancel = self._submit(backend, wanted, events.put_nowait, None if expected is None else expected.seconds)
        self._streams.add(events)
        keep = partial(self._keep, wanted.file_format, request) if body.response_format == "url" else None
        return ImageResponse(
            events,
            cancel,
            ImageWriter(kind, wanted.file_format, keep, body.progress),
            log,
            is_stream=body.stream,
            timeout_s=timeout_s,
            began_s=began_s,
            on_close=lambda: self._streams.discard(events),
        )

    async def _checked(self, backend: DiffusionBackend, wanted: DiffusionRequest) -> Expectation | None:
        """Check a request and return the expected time; raise ApiError if the model cannot make it, or not in time.

        The first request starts the process.
        """
        await backend.wait_for_limits()
        _check(backend, wanted)
        try:
            return await backend.expect(wanted, self._settings.request_timeout_s)
        except ApiError as error:
            if error.status == 429:
                self._metrics.refused.inc()
            raise

    def _keep(self, file_format: str, request: Request, data: bytes) -> str:
        """Store an image and return its URL on this server."""
        name = self.results.put(data, _MEDIA_TYPES[file_format])
        base = request.base_url
        if request.headers.get("x-forwarded-proto") == "https":  # TLS ends at a proxy in front
            base = base.replace(scheme="https")
        return f"{str(base).rstrip('/')}{RESULT_PATH}{name}.{file_format}"

    def _submit(
        self,
        backend: DiffusionBackend,
        wanted: DiffusionRequest,
        listener: ProgressListener,
        expected_s: float | None,
    ) -> Cancel:
        """Put a request into the queue, and count its outcome in the metrics."""
        has_ended = False

        def see(progress: Progress) -> None:
            nonlocal has_ended
            has_ended = progress.is_last
            if progress.result is not None:
                self._metrics.count_result(progress.result, is_video=wanted.is_video)
            listener(progress)

        try:
            cancel = backend.submit(wanted, see, expected_s)
        except ApiError:
            self._metrics.refused.inc()
            raise

        def cancel_once() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._metrics.generations_cancelled.inc()
                cancel()

        return cancel_once

    def _log_content(self, body: DiffusionBody, request: Request) -> None:
        if self._settings.logs_content:
            log: RequestLog = request.state.log
            log.fields["content"] = body.model_dump_json(exclude={"image", "images", "input_reference", "mask"})


def _check(backend: DiffusionBackend, wanted: DiffusionRequest, image_field: str = "image") -> None:
    try:
        backend.check(wanted)
    except RequestError as error:
        raise client_error(error, image_field) from None


def _json_or_form(kind: type[EditBody] | type[VideoBody], file_field: str) -> dict[str, Any]:
    """Return the OpenAPI schema of a body that is JSON or a form with a file."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {**schema["properties"], file_field: {"type": "string", "format": "binary"}}
    form = {**schema, "properties": properties}
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


def add_routes(app: FastAPI, handler: DiffusionHandler) -> None:
    @app.post("/v1/images/generations")
    async def generate(body: ImageBody, request: Request) -> Response:
        """Make images of a prompt: one object or, with `stream`, events."""
        return await handler.generate(body, request)

    @app.post("/v1/images/edits", openapi_extra=_json_or_form(EditBody, "image"))
    async def edit(request: Request) -> Response:
        """Edit an image as a prompt says."""
        return await handler.edit(request)

    @app.post("/v1/videos", openapi_extra=_json_or_form(VideoBody, "input_reference"))
    async def create_video(request: Request) -> Response:
        """Start a job that makes a video."""
        return await handler.create_video(request)

    @app.get("/v1/videos")
    async def list_videos(after: str | None = None, limit: int = 20, order: str = "desc") -> Response:
        """List the video jobs that this server remembers."""
        return handler.list_videos(after, limit, order)

    @app.get("/v1/videos/{video_id}")
    async def video(video_id: str) -> Response:
        """Return a video job with its status and progress."""
        return JsonResponse(handler.videos.get(video_id).as_object())

    @app.get("/v1/videos/{video_id}/content")
    async def content(video_id: str, variant: str = "video") -> Response:
        """Return the file of a complete video."""
        return handler.video_content(video_id, variant)

    @app.delete("/v1/videos/{video_id}")
    async def delete_video(video_id: str) -> Response:
        """Delete a video; cancel its job if it is running."""
        return handler.delete_video(video_id)

    @app.get(RESULT_PATH + "{name}", include_in_schema=False)
    async def result(name: str) -> Response:
        """Return an image that an earlier answer gave by URL."""
        return handler.result(name)
