"""Measures one request: its tokens and their times, or its failure; decodes server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilewright.bench.http_client import Client, HttpError, Response
from tilewright.bench.serve.workload import WorkloadRequest


class EventDecoder:
    """Decodes the data of server-sent events; comments, names and ids are ignored."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._data: list[bytes] = []  # lines of the current event
        self._is_after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Append a piece; return the data of events that it completes. Lines end in LF, CRLF or CR."""
        if self._is_after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._is_after_cr = False
        if b"\r" in piece:
            self._is_after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif piece:
            self._is_after_cr = False
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [event for line in lines if (event := self._add_line(line)) is not None]

    def end(self) -> list[bytes]:
        """Return the last event, if the body ended without its empty line."""
        found = [self._add_line(line) for line in (self._rest, b"")]
        self._rest = b""
        return [event for event in found if event is not None]

    def _add_line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            self._data.append(b"")
        elif not line and self._data:
            event = b"\n".join(self._data)
            self._data = []
            return event
        return None


# Fields of a delta that contain tokens; the role and empty texts do not.
DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")
MAX_ERROR_BYTES = 1 << 14
MAX_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class RequestFailure:
    """The reason of an incomplete answer: a kind, which is counted, and the message of the server or the connection."""

    kind: str
    message: str


@dataclass(frozen=True)
class Sample:
    """The measurements of one request. Times are seconds after it was sent, `sent_s` after the run began."""

    number: int
    wanted_tokens: int
    sent_s: float
    total_s: float
    first_token_s: float | None = None  # None: no token arrived
    gaps_s: tuple[float, ...] = ()  # between chunks of the same choice
    num_chunks: int = 0
    num_choices: int = 1
    output_tokens: int = 0  # of all choices
    is_counted_by_chunks: bool = False  # the server sent no usage
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    failure: RequestFailure | None = None

    @property
    def token_s(self) -> float | None:
        """Seconds per token of a choice after its first; None if there is no second."""
        num_later = self.output_tokens / self.num_choices - 1
        if self.first_token_s is None or num_later <= 0:
            return None
        return (self.total_s - self.first_token_s) / num_later


class StreamError(Exception):
    """An answer is an error, or incomplete; `kind` is that of RequestFailure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class MeasuredAnswer:
    """Collects the events of a stream."""

    first_s: float | None = None
    last_s: dict[int, float] = field(default_factory=dict)  # choice -> time of its last chunk
    gaps_s: list[float] = field(default_factory=list)
    num_chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    is_done: bool = False

    def add(self, event: bytes, now_s: float) -> None:
        """Add an event that arrived at `now_s`; raise StreamError if it is an error, or not part of an answer."""
        if event == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            raise StreamError("malformed", f"an event is {_text(event)!r}, expected JSON") from None
        if not isinstance(chunk, dict) or chunk.get("error") or chunk.get("object") == "error":
            raise StreamError("error in stream", error_message(event))
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        try:
            for choice in chunk.get("choices") or ():
                self._add_choice(choice, now_s)
        except (AttributeError, TypeError):
            raise StreamError("malformed", f"an event is {_text(event)!r}, expected choices like OpenAI's") from None

    def _add_choice(self, choice: dict[str, Any], now_s: float) -> None:
        index = choice.get("index") or 0
        if not isinstance(index, int):
            raise TypeError
        if choice.get("finish_reason"):
            self.finish_reasons[index] = str(choice["finish_reason"])
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in DELTA_FIELDS):
            self._add_token(index, now_s)

    def _add_token(self, index: int, now_s: float) -> None:
        self.num_chunks += 1
        if self.first_s is None:
            self.first_s = now_s
        if index in self.last_s:
            self.gaps_s.append(now_s - self.last_s[index])
        self.last_s[index] = now_s

    def end(self) -> None:
        """Raise StreamError if the stream ended within the answer."""
        if not self.is_done and not self.finish_reasons:
            raise StreamError("closed", "the stream ended without a finish_reason and without [DONE]")

    def sample(self, request: WorkloadRequest, sent_s: float, end_s: float, failure: RequestFailure | None) -> Sample:
        """Return the Sample of the answer; arguments' times are relative to the start of the run."""
        counted = _count(self.usage, "completion_tokens")
        return Sample(
            number=request.number,
            wanted_tokens=request.output_tokens,
            sent_s=sent_s,
            total_s=end_s - sent_s,
            first_token_s=None if self.first_s is None else self.first_s - sent_s,
            gaps_s=tuple(self.gaps_s),
            num_chunks=self.num_chunks,
            num_choices=max(1, len(self.last_s.keys() | self.finish_reasons.keys())),
            output_tokens=self.num_chunks if counted is None else counted,
            is_counted_by_chunks=counted is None,
            prompt_tokens=_count(self.usage, "prompt_tokens"),
            cached_tokens=_count(self.usage.get("prompt_tokens_details"), "cached_tokens"),
            finish_reasons=tuple(self.finish_reasons[index] for index in sorted(self.finish_reasons)),
            failure=failure,
        )


def _count(usage: object, name: str) -> int | None:
    """Return a number of tokens; None if there is none."""
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if isinstance(found, int) else None


async def send_request(
    client: Client, path: str, request: WorkloadRequest, timeout_s: float, began_s: float, clock: Callable[[], float]
) -> Sample:
    """Send a request and return its Sample, also if it fails."""
    answer, failure = MeasuredAnswer(), None
    sent_s = clock() - began_s
    try:
        reading = _read(client, path, request.body, lambda event: answer.add(event, clock() - began_s))
        await asyncio.wait_for(reading, timeout_s)
        answer.end()
    except (asyncio.TimeoutError, TimeoutError):
        failure = RequestFailure("timeout", f"no whole answer within {timeout_s:g} s")
    except (HttpError, StreamError) as error:
        failure = RequestFailure(error.kind, _shortened(str(error)))
    return answer.sample(request, sent_s, clock() - began_s, failure)


async def _read(client: Client, path: str, body: bytes, on_event: Callable[[bytes], None]) -> None:
    async with client.request("POST", path, body) as response:
        await check(response)
        kind = response.headers.get("content-type", "text/event-stream")
        if not kind.startswith("text/event-stream"):
            begin = _text(await response.read(MAX_ERROR_BYTES))
            raise StreamError("no stream", f"the answer is {kind}, expected text/event-stream: {begin}")
        events = EventDecoder()
        async for piece in response.pieces():
            for event in events.feed(piece):
                on_event(event)
        for event in events.end():
            on_event(event)


async def check(response: Response) -> None:
    """Raise StreamError, with the server's message, if the status is not 200."""
    if response.status != 200:
        words = error_message(await response.read(MAX_ERROR_BYTES)) or response.reason
        if location := response.headers.get("location"):
            words += f" (Location: {location})"
        raise StreamError(f"HTTP {response.status}", words)


def error_message(body: bytes) -> str:
    """Return the message in an error's body: OpenAI's error.message, a common alternative, or the text."""
    try:
        found = json.loads(body)
    except ValueError:
        return _shortened(_text(body))
    while isinstance(found, dict):
        inner = next((found[key] for key in ("error", "message", "detail") if found.get(key)), None)
        if inner is None:
            break
        found = inner
    return _shortened(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))


def _text(data: bytes) -> str:
    return _shortened(data.decode("utf-8", "replace"))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[: MAX_MESSAGE_CHARACTERS - 3] + "..."
