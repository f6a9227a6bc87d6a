"""Sends images over HTTP: one object, or a stream with previews; cancels the request when the client leaves."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from tilewright.diffusion.params import PipelineTimings
from tilewright.diffusion.requests import Failure, GeneratedFile, Progress, Result, Start, State
from tilewright.server.api.images.request import client_error
from tilewright.server.http.bodies import JsonResponse
from tilewright.server.http.errors import ApiError
from tilewright.server.http.log import RequestLog
from tilewright.server.http.respond import (
    KEEP_ALIVE_S,
    ClientLeft,
    EventResponse,
    Interruption,
    KeepAliveDue,
    ShuttingDown,
    TimedOut,
    send_end,
    send_event,
)
from tilewright.server.link.backend import Failed
from tilewright.server.link.diffusion import Cancel
from tilewright.types import RequestError

Keep = Callable[[bytes], str]  # an image's bytes -> the URL it is served at
Event = Progress | ClientLeft | TimedOut | ShuttingDown | KeepAliveDue


def error_of(failure: Failure) -> Exception:
    """Return the error of a failed request."""
    error = Failed(failure.kind, failure.message, failure.param, failure.code).error()
    return client_error(error) if isinstance(error, RequestError) else error


class ImageWriter:
    """Makes the objects of OpenAI's interface from the events of a request."""

    def __init__(self, kind: str, output_format: str, keep: Keep | None, shows_progress: bool) -> None:
        """`kind` is "image_generation" or "image_edit"; with `keep`, answers have URLs of images."""
        self._kind = kind
        self._format = output_format
        self._keep = keep
        self._shows_progress = shows_progress
        self._created = int(time.time())
        self._began_s = time.perf_counter()
        self._queued_s = 0.0
        self._size = "auto"

    def chunks(self, progress: Progress) -> Iterator[Mapping[str, Any]]:
        """Yield the stream events for a progress of the worker."""
        if progress.preview is not None:
            yield {
                "type": f"{self._kind}.partial_image",
                "b64_json": base64.b64encode(progress.preview.data).decode(),
                "partial_image_index": progress.preview.index,
                "image_index": progress.preview.image_index,
                "step": progress.step,
                "num_steps": progress.num_steps,
                **self._common("jpeg"),
            }
        elif progress.result is not None:
            for index, file in enumerate(progress.result.files):
                yield {
                    "type": f"{self._kind}.completed",
                    **self._image(file),
                    "image_index": index,
                    "timings": self._timings(progress.result),
                    **self._common(self._format),
                }
        elif self._shows_progress and progress.state is State.QUEUED:
            yield {"type": f"{self._kind}.progress", "status": "queued", "num_before": progress.num_before}
        elif self._shows_progress and progress.state is State.RUNNING:
            steps = {"status": "in_progress", "step": progress.step, "num_steps": progress.num_steps}
            yield {"type": f"{self._kind}.progress", **steps, **self._start(progress.start)}

    def result(self, result: Result) -> Mapping[str, Any]:
        return {
            "created": self._created,
            "background": "opaque",
            "data": [self._image(file) for file in result.files],
            "output_format": self._format,
            "size": self._size,
            "timings": self._timings(result),
        }

    def begin(self, start: Start) -> None:
        """Record the size, and how long the request waited."""
        self._size = f"{start.width}x{start.height}"
        self._queued_s = time.perf_counter() - self._began_s

    def _start(self, start: Start | None) -> dict[str, Any]:
        if start is None:
            return {}
        return {"size": self._size, "expected_s": start.expected_s, "expected_from": start.expected_from}

    def _image(self, file: GeneratedFile) -> dict[str, Any]:
        if self._keep is not None:
            return {"url": self._keep(file.data), "settings": dict(file.settings)}
        return {"b64_json": base64.b64encode(file.data).decode(), "settings": dict(file.settings)}

    def _common(self, file_format: str) -> dict[str, Any]:
        return {
            "created_at": self._created,
            "size": self._size,
            "quality": "auto",
            "background": "opaque",
            "output_format": file_format,
        }

    def _timings(self, result: Result) -> dict[str, float]:
        return {**timings_of(result.timings, self._queued_s), "total_s": time.perf_counter() - self._began_s}


def timings_of(timings: PipelineTimings, queued_s: float) -> dict[str, float]:
    """Return the seconds that the parts of a request took, and the mean of a step."""
    return {
        "queued_s": queued_s,
        "load_s": timings.load_s,
        "encode_s": timings.encode_s,
        "denoise_s": timings.denoise_s,
        "decode_s": timings.decode_s,
        "step_s": sum(timings.steps_s) / len(timings.steps_s),
    }


class ImageResponse(EventResponse):
    """Sends what its writer makes of a request's events, and always cancels the request at the end."""

    def __init__(
        self,
        events: asyncio.Queue[Event],
        cancel: Cancel,
        writer: ImageWriter,
        log: RequestLog,
        *,
        is_stream: bool,
        timeout_s: float,
        began_s: float,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(log, is_stream=is_stream, timeout_s=timeout_s, began_s=began_s, on_close=on_close)
        self._events = events
        self._cancel = cancel
        self._writer = writer

    def _notify(self, event: ClientLeft | TimedOut | KeepAliveDue) -> None:
        self._events.put_nowait(event)

    def _abort(self) -> None:
        self._cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        result = await self._receive(send)
        if self._is_stream:
            await send_end(send)
        else:
            await JsonResponse(self._writer.result(result))(scope, receive, send)

    async def _send_failure(self, send: Send, error: ApiError) -> None:
        await send_event(send, {"type": "error", **error.body()}, "error")

    async def _receive(self, send: Send) -> Result:
        """Receive events until there is a result, and return it. A stream is sent as events arrive."""
        loop = asyncio.get_running_loop()
        while True:
            # A step of a large model takes minutes on a small machine; proxies close a silent connection.
            keep_alive = loop.call_later(KEEP_ALIVE_S, self._notify, KeepAliveDue())
            try:
                event = await self._events.get()
            finally:
                keep_alive.cancel()
            if isinstance(event, Interruption):
                raise self._interrupted(event)
            if isinstance(event, KeepAliveDue):
                if self._is_stream:
                    await self._comment(send, "drawing")
                continue
            if event.failure is not None:
                raise error_of(event.failure)
            if event.start is not None:
                self._writer.begin(event.start)
                if event.start.expected_s is not None:
                    self._log.fields["expected_s"] = round(event.start.expected_s, 2)
            if self._is_stream:
                for chunk in self._writer.chunks(event):
                    await self._begin(send)
                    await send_event(send, chunk, chunk["type"])
            if event.result is not None:
                self._log.add(pictures=len(event.result.files), steps=len(event.result.timings.steps_s))
                return event.result
