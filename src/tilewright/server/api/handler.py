"""Admits a request for an answer, prepares it and submits it to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from tilewright.server.api.bodies import GenerationBody
from tilewright.server.api.endpoints import ENDPOINTS, FILE_ENDPOINTS, Context, PreparedRequest
from tilewright.server.api.pictures.handler import PictureHandler
from tilewright.server.api.responses.request import ResponseHistory
from tilewright.server.http.admission import Admission, MemoryReservation
from tilewright.server.http.bodies import JsonResponse
from tilewright.server.http.errors import ApiError
from tilewright.server.http.log import RequestLog
from tilewright.server.http.metrics import Metrics
from tilewright.server.http.respond import Answer, AnswerResponse, ShuttingDown, disconnected, shutting_down, timed_out
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.backend import Backend, ModelInfo
from tilewright.server.link.pictures import PictureBackend
from tilewright.server.media.gate import MediaGate
from tilewright.types import EngineUnavailable

# A step that takes longer is reported as hanging: steps of the longest prompts take seconds.
MAX_STEP_S = 300.0
MAX_LOGGED = 10_000  # characters of a body in the log, with --log-content: pictures are longer


class ApiHandler:
    """Turns the validated body of a request into a response that sends its answer."""

    def __init__(
        self, settings: ServerSettings, backend: Backend | None, pictures: PictureBackend | None = None
    ) -> None:
        """`backend` is None on a server that only makes pictures."""
        self.settings = settings
        self.backend = backend
        self.metrics = metrics = Metrics()
        self.gate = MediaGate(settings.media)
        self.pictures = PictureHandler(settings, pictures, self.gate, metrics)
        self._admission = Admission(settings.max_queue, metrics)
        self._history = ResponseHistory()
        self._answers: set[Answer] = set()  # in progress
        self._is_shutting_down = asyncio.Event()
        self.started_s = int(time.time())

    @property
    def model(self) -> ModelInfo:
        model = self._engine.model
        return replace(model, name=self.settings.served_name or model.name)

    @property
    def _engine(self) -> Backend:
        if self.backend is None:
            raise ApiError(404, "this server makes pictures only: it has no model for text", code="model_not_found")
        return self.backend

    def check_model(self, name: str | None) -> ModelInfo:
        """Return the model; raise a 404 if `name` is not its name."""
        model = self.model
        if name and not model.is_meant_by(name) and name != self._engine.model.name:
            message = f"there is no model {name[:200]!r} here, only {model.name!r}"
            if self.pictures.is_meant_by(name):
                message = f"the model {name[:200]!r} makes pictures only, use {model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    async def answer(self, body: GenerationBody, request: Request) -> Response:
        """Submit a request to the engine and return the response that will send its answer."""
        if self._is_shutting_down.is_set():  # the request came on an open connection
            raise shutting_down()
        model = self.check_model(body.model)
        log: RequestLog = request.state.log
        self._log_content(body, log)
        log.fields["stream"] = body.stream
        began_s = asyncio.get_running_loop().time()
        slot = self._admission.enter(body.num_answers, model.max_sequences)
        try:
            requests, make_writer = await self._prepare(body, model, request)
            answer = Answer(self._engine, requests)
            self._answers.add(answer)

            def leave() -> None:
                self._answers.discard(answer)
                slot.release()

            return AnswerResponse(
                answer,
                make_writer,
                log,
                is_stream=body.stream,
                timeout_s=self.settings.request_timeout_s,
                began_s=began_s,
                on_close=leave,
            )
        except BaseException:
            slot.release()
            raise

    def model_objects(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models: each model with its modalities and limits."""
        pictures = [self.pictures.model_object(self.started_s)] if self.pictures.backend else []
        return pictures if self.backend is None else [self._model_object(), *pictures]

    def model_object(self, name: str) -> dict[str, Any]:
        """Return the model's entry of /v1/models; raise a 404 for another name."""
        if self.pictures.is_meant_by(name):
            return self.pictures.model_object(self.started_s)
        self.check_model(name)
        return self._model_object()

    def _model_object(self) -> dict[str, Any]:
        model, limits = self.model, self.settings.media.limits
        return {
            "id": model.name,
            "object": "model",
            "created": self.started_s,
            "owned_by": "tilewright",
            "max_model_len": model.max_context,
            "input_modalities": ["text", *model.accepts],
            "output_modalities": ["text", "audio"] if model.voices else ["text"],
            **({"voices": list(model.voices), "voice_aliases": dict(model.voice_aliases)} if model.voices else {}),
            "limits": {
                "max_body_bytes": self.settings.max_body_bytes,
                "max_media_bytes": limits.max_bytes,
                "max_media_total_bytes": limits.max_total_bytes,
                "max_media": limits.max_items,
                "max_pixels": limits.max_pixels,
                "max_duration_s": limits.max_duration_s,
            },
        }

    async def close(self) -> None:
        """Close the picture handler and the media gate. The caller closes the backend."""
        await self.pictures.close()
        await self.gate.close()

    def shut_down(self) -> None:
        """End all running answers with an error that says the server is shutting down: the drain timeout is over."""
        self._is_shutting_down.set()
        for answer in self._answers:
            answer.notify(ShuttingDown())
        self.pictures.shut_down()

    async def _prepare(self, body: GenerationBody, model: ModelInfo, request: Request) -> PreparedRequest:
        """Prepare the request and read its media; raise if the client leaves, time is up or the server shuts down."""
        reservation: MemoryReservation = request.state.reservation
        context = Context(model, self.gate, self._history, self.settings.media.limits, reservation.add)
        endpoint = {**ENDPOINTS, **FILE_ENDPOINTS}[request.url.path]
        preparing = asyncio.ensure_future(endpoint.prepare(body, context))
        leaving = asyncio.ensure_future(disconnected(request.receive))
        ending = asyncio.ensure_future(self._is_shutting_down.wait())
        timeout_s = self.settings.request_timeout_s
        try:
            await asyncio.wait({preparing, leaving, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not preparing.done():
                if ending.done():
                    raise shutting_down()
                raise ApiError(499, "the client left", code="client_left") if leaving.done() else timed_out(timeout_s)
            return preparing.result()
        finally:
            for task in (leaving, ending, preparing):
                task.cancel()

    def _log_content(self, body: GenerationBody, log: RequestLog) -> None:
        if self.settings.logs_content:
            text = body.model_dump_json(exclude_unset=True)
            log.fields["content"] = (
                text if len(text) <= MAX_LOGGED else f"{text[:MAX_LOGGED]}... {len(text)} characters"
            )

    async def health(self) -> Response:
        """Return 200 if a request would be answered now. The picture worker may not have started: requests start it.

        If chat is available and pictures are not, the answer is 200 and `pictures` has the reason.
        """
        without_pictures = None
        try:
            if self.pictures.backend is not None:
                self.pictures.backend.check_running()
        except EngineUnavailable as error:
            without_pictures = str(error)
        if self.backend is None:
            if without_pictures:
                return JsonResponse({"status": "unavailable", "reason": without_pictures}, 503)
            return JsonResponse({"status": "ok", "replicas": 0})
        try:
            stats = await self.backend.stats()
        except EngineUnavailable as error:
            return JsonResponse({"status": "unavailable", "reason": str(error)}, 503)
        if stats["step_age_s"] > MAX_STEP_S:
            reason = f"a step has been running for {stats['step_age_s']:.0f} s"
            return JsonResponse({"status": "unavailable", "reason": reason}, 503)
        pictures = {"pictures": without_pictures} if without_pictures else {}
        return JsonResponse({"status": "ok", "replicas": stats["num_replicas"], **pictures})

    async def metrics_text(self) -> Response:
        stats: Mapping[str, float] | None = {} if self.backend is None else None
        num_restarts = 0
        if self.backend is not None:
            num_restarts = self.backend.num_restarts
            with contextlib.suppress(EngineUnavailable):
                stats = await self.backend.stats()
        pictures = self.pictures.backend
        text = self.metrics.text(stats, num_restarts, None if pictures is None else pictures.stats())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
