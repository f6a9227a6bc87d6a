"""Admits a request for an answer, prepares it and submits it to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from tilewright.server.api.bodies import GenerationBody
from tilewright.server.api.endpoints import ENDPOINTS, FILE_ENDPOINTS, Context, Endpoint, PreparedRequest
from tilewright.server.api.images.handler import DiffusionHandler
from tilewright.server.api.responses.request import ResponseHistory
from tilewright.server.api.served import Served, ServedImageModel, ServedTextModel
from tilewright.server.http.admission import Admission, MemoryReservation
from tilewright.server.http.bodies import JsonResponse
from tilewright.server.http.errors import ApiError
from tilewright.server.http.log import RequestLog
from tilewright.server.http.metrics import Metrics
from tilewright.server.http.respond import Answer, AnswerResponse, ShuttingDown, disconnected, shutting_down, timed_out
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.backend import Backend, ModelInfo
from tilewright.server.link.diffusion import DiffusionBackend
from tilewright.server.media.gate import MediaGate
from tilewright.types import EngineUnavailable

# A step that takes longer is reported as hanging: steps of the longest prompts take seconds.
MAX_STEP_S = 300.0
MAX_LOGGED = 10_000  # characters of a body in the log, with --log-content: images are longer


class ApiHandler:
    """Turns the validated body of a request into a response that sends its answer."""

    def __init__(
        self,
        settings: ServerSettings,
        backends: Sequence[Backend] = (),
        image_backends: Sequence[DiffusionBackend] = (),
    ) -> None:
        """`backends` answer in text, and close themselves; those of images are closed with the handler."""
        self.settings = settings
        self.metrics = metrics = Metrics()
        self.gate = MediaGate(settings.media)
        self.served = Served(
            [ServedTextModel(one, Admission(settings.max_queue, metrics), settings.served_name) for one in backends],
            [ServedImageModel(one) for one in image_backends],
        )
        self.diffusion = DiffusionHandler(settings, self.served, self.gate, metrics)
        self._history = ResponseHistory()
        self._answers: set[Answer] = set()  # in progress
        self._is_shutting_down = asyncio.Event()
        self.started_s = int(time.time())

    async def answer(self, body: GenerationBody, request: Request) -> Response:
        """Submit a request to the engine and return the response that will send its answer."""
        if self._is_shutting_down.is_set():  # the request came on an open connection
            raise shutting_down()
        endpoint = {**ENDPOINTS, **FILE_ENDPOINTS}[request.url.path]
        served = self.served.find_text(body.model, endpoint.kind)
        model = served.info
        log: RequestLog = request.state.log
        self._log_content(body, log)
        log.fields["stream"] = body.stream
        began_s = asyncio.get_running_loop().time()
        slot = served.admission.enter(body.num_answers, model.max_sequences)
        try:
            requests, make_writer = await self._prepare(endpoint, body, model, request)
            answer = Answer(served.backend, requests)
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
        """Return the models and what each can do, for /v1/models."""
        return self.served.objects(self.started_s, self.settings)

    def model_object(self, name: str) -> dict[str, Any]:
        """Return one model; raise a 404 if there is none of that name."""
        return self.served.find(name).as_object(self.started_s, self.settings)

    async def close(self) -> None:
        """Close the image handler and the media gate. The caller closes the backend."""
        await self.diffusion.close()
        await self.gate.close()

    def shut_down(self) -> None:
        """End all running answers with an error that says the server is shutting down: the drain timeout is over."""
        self._is_shutting_down.set()
        for answer in self._answers:
            answer.notify(ShuttingDown())
        self.diffusion.shut_down()

    async def _prepare(
        self, endpoint: Endpoint, body: GenerationBody, model: ModelInfo, request: Request
    ) -> PreparedRequest:
        """Prepare the request and read its media; raise if the client leaves, time is up or the server shuts down."""
        reservation: MemoryReservation = request.state.reservation
        context = Context(model, self.gate, self._history, self.settings.media.limits, reservation.add)
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
        """Return 200 if a request would be answered now. The diffusion worker may not have started: requests start it.

        If chat is available and images are not, the answer is 200 and `pictures` has the reason.
        """
        unavailable = None
        for image_model in self.served.image_models:
            try:
                image_model.backend.check_running()
            except EngineUnavailable as error:
                unavailable = str(error)
        if unavailable and not self.served.text_models:
            return JsonResponse({"status": "unavailable", "reason": unavailable}, 503)
        num_replicas = 0
        for model in self.served.text_models:
            try:
                stats = await model.backend.stats()
            except EngineUnavailable as error:
                return JsonResponse({"status": "unavailable", "reason": str(error)}, 503)
            if stats["step_age_s"] > MAX_STEP_S:
                reason = f"a step has been running for {stats['step_age_s']:.0f} s"
                return JsonResponse({"status": "unavailable", "reason": reason}, 503)
            num_replicas += int(stats["num_replicas"])
        images = {"pictures": unavailable} if unavailable else {}
        return JsonResponse({"status": "ok", "replicas": num_replicas, **images})

    async def metrics_text(self) -> Response:
        # The metrics have no label for a model: they are those of the first of each sort.
        stats: Mapping[str, float] | None = {}
        num_restarts = 0
        for model in self.served.text_models[:1]:
            stats, num_restarts = None, model.backend.num_restarts
            with contextlib.suppress(EngineUnavailable):
                stats = await model.backend.stats()
        images = next((model.backend.stats() for model in self.served.image_models), None)
        text = self.metrics.text(stats, num_restarts, images)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
