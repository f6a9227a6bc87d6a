"""Sends an answer over HTTP as a stream of events or one object; aborts it when the client leaves.

Events of the engine and of the connection arrive in one queue.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from tilewright.server.api.bodies import SamplingBody
from tilewright.server.http.bodies import JsonResponse, to_json
from tilewright.server.http.errors import ApiError, as_api_error
from tilewright.server.http.log import RequestLog
from tilewright.server.link.backend import (
    SERVER_ENDING,
    SHUTTING_DOWN,
    Abort,
    AnswerDelta,
    Backend,
    Ended,
    EngineRequest,
    Event,
    Failed,
    Restarted,
    Started,
)
from tilewright.types import EngineUnavailable


@dataclass(frozen=True)
class ClientLeft:
    """The client has left."""


@dataclass(frozen=True)
class TimedOut:
    """The request has reached its timeout."""


@dataclass(frozen=True)
class ShuttingDown:
    """The server shuts down, and its drain timeout is over."""


@dataclass(frozen=True)
class KeepAliveDue:
    """No data was sent for KEEP_ALIVE_S; a proxy may close a silent connection."""


AnswerEvent = Started | AnswerDelta | Ended | Restarted | ClientLeft | TimedOut | ShuttingDown | KeepAliveDue


class Answer:
    """The events of all prompts of one request, in order. The only reader calls `abort` at the end."""

    def __init__(self, backend: Backend, requests: Sequence[EngineRequest]) -> None:
        self._events: asyncio.Queue[tuple[int, Event | AnswerEvent]] = asyncio.Queue()  # bounded by the answer's length
        self._aborts: list[Abort] = []
        self.num_prompts = len(requests)
        try:
            for prompt_index, request in enumerate(requests):
                self._aborts.append(backend.submit(request, partial(self._put, prompt_index)))
        except BaseException:
            self.abort()
            raise

    def notify(self, event: ClientLeft | TimedOut | ShuttingDown | KeepAliveDue) -> None:
        """Add an event that is not the engine's."""
        self._put(0, event)

    async def next(self) -> tuple[int, AnswerEvent]:
        """Return the index of a prompt and its next event; raise the error of a Failed event."""
        prompt_index, event = await self._events.get()
        if isinstance(event, Failed):
            raise event.error()
        return prompt_index, event

    def abort(self) -> None:
        """Abort all prompts that are still being computed."""
        for abort in self._aborts:
            abort()

    def _put(self, prompt_index: int, event: Event | AnswerEvent) -> None:
        self._events.put_nowait((prompt_index, event))


class ChunkWriter(ABC):
    """A Writer that streams chunks, with the usage at the end if stream_options.include_usage is set."""

    names_events = False
    has_sound = False

    def __init__(self, body: SamplingBody) -> None:
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage
        # With include_usage, all other chunks have "usage": null, as OpenAI's do.
        self.no_usage: dict[str, None] = {"usage": None} if self._includes_usage else {}

    @abstractmethod
    def usage_chunk(self) -> dict[str, Any]:
        """Return a chunk without choices that has the token counts."""

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks after the last chunk of the answers."""
        if self._includes_usage:
            yield self.usage_chunk()

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the chunks that end a stream with an error."""
        yield error.body()


# Prefill of a long prompt takes minutes on a small machine; proxies commonly close a silent connection after 60 s.
KEEP_ALIVE_S = 15.0
# Added to the timeout, for a client that does not read its answer.
GRACE_S = 30.0
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer tokens
]


Interruption = ClientLeft | TimedOut | ShuttingDown


class Writer(Protocol):
    """Makes the objects of one interface from the engine's events."""

    names_events: bool  # send a chunk's "type" as the event's name, and no [DONE] at the end

    @property
    def has_sound(self) -> bool:
        """True if `result` encodes sound and so runs in another thread: minutes of sound take seconds."""

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[Mapping[str, Any]]: ...

    def closing_chunks(self) -> Iterator[Mapping[str, Any]]: ...

    def failure_chunks(self, error: ApiError) -> Iterator[Mapping[str, Any]]: ...

    def result(self) -> Mapping[str, Any] | str | Response: ...


def _as_response(result: Mapping[str, Any] | str | Response) -> Response:
    if isinstance(result, Response):
        return result
    return PlainTextResponse(result) if isinstance(result, str) else JsonResponse(result)


class GoneClient(Exception):
    """The client has left, so that the rest of the response is not sent."""


class EventResponse(Response):
    """A response made from the events of a computation, which it aborts when the client leaves or at the timeout.

    Subclasses define how to add an event (`_notify`), to abort the computation (`_abort`), to send the response
    (`_send`), and to send an error in a stream that has begun (`_send_failure`).
    """

    def __init__(
        self,
        log: RequestLog,
        *,
        is_stream: bool,
        timeout_s: float,
        on_close: Callable[[], None],
        began_s: float | None = None,
    ) -> None:
        """`began_s` is the start of the timeout, by the event loop's clock; default: now."""
        super().__init__()
        self._log = log
        self._is_stream = is_stream
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._began_s = began_s
        self._has_head = False  # status and headers are sent

    def _notify(self, event: ClientLeft | TimedOut | KeepAliveDue) -> None:
        raise NotImplementedError

    def _abort(self) -> None:
        raise NotImplementedError

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole response; raise GoneClient if the client has left."""
        raise NotImplementedError

    async def _send_failure(self, send: Send, error: ApiError) -> None:
        """Send the last events of a stream that ends with an error."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        leaving = loop.create_task(self._watch(receive))
        began_s = loop.time() if self._began_s is None else self._began_s
        timer = loop.call_at(began_s + self._timeout_s, self._notify, TimedOut())
        try:
            await asyncio.wait_for(self._respond(scope, receive, send), self._timeout_s + GRACE_S)
        except asyncio.TimeoutError:
            self._log.outcome = "the client did not read its answer"
        finally:
            timer.cancel()
            leaving.cancel()
            self._abort()
            self._on_close()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(scope, receive, send)
        except GoneClient:
            self._log.outcome = "the client left"
        except Exception as error:
            known = as_api_error(error)
            self._log.fail(known, error)
            if self._has_head:
                await self._send_failure(send, known)
                await send_end(send)
            else:
                await JsonResponse(known.body(), known.status, known.headers)(scope, receive, send)

    async def _begin(self, send: Send) -> None:
        if not self._has_head:
            self._has_head = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def _comment(self, send: Send, text: str) -> None:
        """Send a comment, which keeps a silent stream open."""
        await self._begin(send)
        await send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})

    def _interrupted(self, event: Interruption) -> Exception:
        """Return the exception that ends the response before it is complete."""
        if isinstance(event, ClientLeft):
            return GoneClient()
        return timed_out(self._timeout_s) if isinstance(event, TimedOut) else shutting_down()

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._notify(ClientLeft())


class AnswerResponse(EventResponse):
    """Sends what its Writer makes of an Answer's events, and always aborts the Answer at the end."""

    def __init__(
        self,
        answer: Answer,
        make_writer: Callable[[], Writer],
        log: RequestLog,
        *,
        is_stream: bool,
        timeout_s: float,
        began_s: float,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(log, is_stream=is_stream, timeout_s=timeout_s, on_close=on_close, began_s=began_s)
        self._answer = answer
        self._make_writer = make_writer
        self._writer = make_writer()
        self._has_chunk = False

    def _notify(self, event: ClientLeft | TimedOut | KeepAliveDue) -> None:
        self._answer.notify(event)

    def _abort(self) -> None:
        self._answer.abort()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._stream(send) if self._is_stream else self._send_whole(scope, receive, send))

    async def _send_failure(self, send: Send, error: ApiError) -> None:
        for chunk in self._writer.failure_chunks(error):
            await send_event(send, chunk, self._name(chunk))

    async def _stream(self, send: Send) -> None:
        async for prompt_index, event in self._events(send):
            if isinstance(event, Restarted):
                raise EngineUnavailable(
                    "the replica was lost, and another one answers differently; send the request again"
                )
            for chunk in self._writer.add(prompt_index, event):
                await self._begin(send)
                self._has_chunk = True
                await send_event(send, chunk, self._name(chunk))
        await self._begin(send)
        for chunk in self._writer.closing_chunks():
            await send_event(send, chunk, self._name(chunk))
        if not self._writer.names_events:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send_end(send)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        events: list[tuple[int, Started | AnswerDelta | Ended]] = []  # replayed to a new writer after a restart
        async for prompt_index, event in self._events(None):
            if isinstance(event, Restarted):
                events = [one for one in events if one[0] != prompt_index]
                self._writer = self._make_writer()
                new = events
            else:
                events.append((prompt_index, event))
                new = events[-1:]
            for one in new:
                for _ in self._writer.add(*one):
                    pass
        response = await asyncio.to_thread(self._whole) if self._writer.has_sound else self._whole()
        await response(scope, receive, send)

    def _whole(self) -> Response:
        return _as_response(self._writer.result())

    async def _events(self, send: Send | None) -> Any:
        """Yield the engine's events until all prompts are answered. With `send`, comments keep a silent stream open."""
        num_left = self._answer.num_prompts
        loop = asyncio.get_running_loop()
        keep_alive = loop.call_later(KEEP_ALIVE_S, self._answer.notify, KeepAliveDue()) if send else None
        try:
            while num_left:
                prompt_index, event = await self._answer.next()
                if isinstance(event, Interruption):
                    raise self._interrupted(event)
                if isinstance(event, KeepAliveDue):
                    # Needed before the first chunk only: in a long prefill, or while an echo waits for its answer.
                    if send and not self._has_chunk:
                        await self._comment(send, "reading")
                        keep_alive = loop.call_later(KEEP_ALIVE_S, self._answer.notify, KeepAliveDue())
                    continue
                if not isinstance(event, Restarted):
                    self._log.record(event)
                num_left -= isinstance(event, Ended)
                yield prompt_index, event
        finally:
            if keep_alive:
                keep_alive.cancel()

    def _name(self, chunk: Mapping[str, Any]) -> str | None:
        return chunk["type"] if self._writer.names_events else None


async def disconnected(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


def timed_out(timeout_s: float) -> ApiError:
    message = f"the answer took longer than {timeout_s:g} s, the limit of this server"
    return ApiError(504, message, kind="server_error", code="timeout")


def shutting_down() -> ApiError:
    return ApiError(503, SHUTTING_DOWN, kind="server_error", code=SERVER_ENDING, headers={"Connection": "close"})


async def send_event(send: Send, data: Mapping[str, Any], name: str | None) -> None:
    """Send an event of a stream."""
    head = f"event: {name}\ndata: ".encode() if name else b"data: "
    await send({"type": "http.response.body", "body": head + to_json(data) + b"\n\n", "more_body": True})


async def send_end(send: Send) -> None:
    """End a stream."""
    await send({"type": "http.response.body", "body": b"", "more_body": False})
