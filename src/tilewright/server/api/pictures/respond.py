"""Sends pictures over HTTP: one object, or a stream with previews; cancels the request when the client leaves."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from tilewright.diffusion.requests import Began, Made, MadeFile, NotMade, PictureEvent, Previewed, Stepped, Waiting
from tilewright.server.api.pictures.request import client_error
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
from tilewright.server.link.pictures import Cancel
from tilewright.types import RequestError

Keep = Callable[[bytes], str]  # a picture's bytes -> the URL it is served at
Event = PictureEvent | ClientLeft | TimedOut | ShuttingDown | KeepAliveDue


def failure_of(event: NotMade) -> Exception:
    """Return the error of a failed request."""
    error = Failed(event.kind, event.message, event.param, event.code).error()
    return client_error(error) if isinstance(error, RequestError) else error


class PictureWriter:
    """Makes the objects of OpenAI's interface from the events of a request."""

    def __init__(self, kind: str, output_format: str, keep: Keep | None, shows_progress: bool) -> None:
        """`kind` is "image_generation" or "image_edit"; with `keep`, answers have URLs of pictures."""
        self._kind = kind
        self._format = output_format
        self._keep = keep
        self._shows_progress = shows_progress
        self._created = int(time.time())
        self._began_s = time.perf_counter()
        self._queued_s = 0.0
        self._size = "auto"

    def chunks(self, event: PictureEvent) -> Iterator[Mapping[str, Any]]:
        """Yield the stream events for one event of the worker."""
        if isinstance(event, Began):
            self._note(event)
        if isinstance(event, Waiting | Began | Stepped) and self._shows_progress:
            yield {"type": f"{self._kind}.progress", **self._progress(event)}
        elif isinstance(event, Previewed):
            yield {
                "type": f"{self._kind}.partial_image",
                "b64_json": base64.b64encode(event.data).decode(),
                "partial_image_index": event.index,
                "image_index": event.picture,
                "step": event.step,
                "num_steps": event.num_steps,
                **self._common("jpeg"),
            }
        elif isinstance(event, Made):
            for index, file in enumerate(event.files):
                yield {
                    "type": f"{self._kind}.completed",
                    **self._picture(file),
                    "image_index": index,
                    "timings": self._timings(event),
                    **self._common(self._format),
                }

    def result(self, made: Made) -> Mapping[str, Any]:
        return {
            "created": self._created,
            "background": "opaque",
            "data": [self._picture(file) for file in made.files],
            "output_format": self._format,
            "size": self._size,
            "timings": self._timings(made),
        }

    def see(self, event: PictureEvent) -> None:
        """Record what a response without a stream needs of an event."""
        if isinstance(event, Began):
            self._note(event)

    def _note(self, event: Began) -> None:
        self._size = f"{event.width}x{event.height}"
        self._queued_s = time.perf_counter() - self._began_s

    def _progress(self, event: Waiting | Began | Stepped) -> dict[str, Any]:
        if isinstance(event, Waiting):
            return {"status": "queued", "num_before": event.num_before}
        if isinstance(event, Began):
            begun = {"status": "in_progress", "step": 0, "num_steps": event.num_steps, "size": self._size}
            return {**begun, "expected_s": event.expected_s, "expected_from": event.expected_from}
        return {"status": "in_progress", "step": event.step, "num_steps": event.num_steps}

    def _picture(self, file: MadeFile) -> dict[str, Any]:
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

    def _timings(self, made: Made) -> dict[str, float]:
        return {**timings_of(made, self._queued_s), "total_s": time.perf_counter() - self._began_s}


def timings_of(made: Made, queued_s: float) -> dict[str, float]:
    """Return the seconds that the parts of a request took, and the mean of a step."""
    return {
        "queued_s": queued_s,
        "load_s": made.load_s,
        "encode_s": made.encode_s,
        "denoise_s": made.denoise_s,
        "decode_s": made.decode_s,
        "step_s": sum(made.steps_s) / len(made.steps_s),
    }


class PictureResponse(EventResponse):
    """Sends what its writer makes of a request's events, and always cancels the request at the end."""

    def __init__(
        self,
        events: asyncio.Queue[Event],
        cancel: Cancel,
        writer: PictureWriter,
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
        made = await self._receive(send)
        if self._is_stream:
            await send_end(send)
        else:
            await JsonResponse(self._writer.result(made))(scope, receive, send)

    async def _send_failure(self, send: Send, error: ApiError) -> None:
        await send_event(send, {"type": "error", **error.body()}, "error")

    async def _receive(self, send: Send) -> Made:
        """Receive events until the pictures are made, and return them. A stream is sent as events arrive."""
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
            if isinstance(event, NotMade):
                raise failure_of(event)
            if isinstance(event, KeepAliveDue):
                if self._is_stream:
                    await self._comment(send, "drawing")
                continue
            if isinstance(event, Began) and event.expected_s is not None:
                self._log.fields["expected_s"] = round(event.expected_s, 2)
            if self._is_stream:
                for chunk in self._writer.chunks(event):
                    await self._begin(send)
                    await send_event(send, chunk, chunk["type"])
            else:
                self._writer.see(event)
            if isinstance(event, Made):
                self._log.add(pictures=len(event.files), steps=len(event.steps_s))
                return event
