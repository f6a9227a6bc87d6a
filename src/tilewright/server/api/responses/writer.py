"""Builds items (reasoning, text, function calls), the Response and its events from pieces of an answer."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from tilewright.server.api.bodies import ChatBody
from tilewright.server.api.chat import make_output_parser, usage
from tilewright.server.api.responses.request import ResponseHistory
from tilewright.server.http.errors import ApiError
from tilewright.server.link.backend import AnswerDelta, Ended, ModelInfo, Started
from tilewright.server.output import OutputParser, Piece, ToolCallDelta

Fields = dict[str, Any]  # an event's own fields, with "type"; ResponseBuilder adds the common ones


class Item(ABC):
    """The part of one item that is generated so far."""

    prefix: str  # begins its id

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.status = "in_progress"
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The item's text so far."""
        return "".join(self._parts)

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the item's current JSON object."""

    @abstractmethod
    def continues_with(self, piece: Piece) -> bool:
        """Return whether the piece belongs to this item."""

    @abstractmethod
    def opening(self) -> list[Fields]:
        """Return the events between the item's start and its first text."""

    @abstractmethod
    def add(self, piece: Piece) -> list[Fields]:
        """Append a piece and return its events."""

    @abstractmethod
    def closing(self) -> list[Fields]:
        """Return the events between the item's last text and its end."""


class _PartItem(Item):
    """An item whose text is in a content part."""

    event: str  # names the events of its text

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]: ...

    def _extra(self) -> Fields:
        return {}

    def opening(self) -> list[Fields]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part("")}]

    def add(self, piece: Piece) -> list[Fields]:
        delta = piece.content or piece.reasoning
        self._parts.append(delta)
        return [{"type": f"response.{self.event}.delta", "content_index": 0, "delta": delta, **self._extra()}]

    def closing(self) -> list[Fields]:
        return [
            {"type": f"response.{self.event}.done", "content_index": 0, "text": self.text, **self._extra()},
            {"type": "response.content_part.done", "content_index": 0, "part": self._part(self.text)},
        ]

    def _content(self) -> list[dict[str, Any]]:
        return [self._part(self.text)] if self._parts else []


class TextItem(_PartItem):
    """A message item: the answer's text."""

    prefix = "msg"
    event = "output_text"

    def snapshot(self) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": self._content()
        }  # fmt: skip

    def continues_with(self, piece: Piece) -> bool:
        return bool(piece.content)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _extra(self) -> Fields:
        return {"logprobs": []}


class ReasoningItem(_PartItem):
    """A reasoning item."""

    prefix = "rs"
    event = "reasoning_text"

    def snapshot(self) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "status": self.status, "content": self._content()}

    def continues_with(self, piece: Piece) -> bool:
        return bool(piece.reasoning)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem(Item):
    """A function call item."""

    prefix = "fc"

    def __init__(self, first: ToolCallDelta) -> None:
        super().__init__()
        self._index = first.index
        self._call_id = first.id
        self._name = first.name

    def snapshot(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }

    def continues_with(self, piece: Piece) -> bool:
        return piece.tool_call is not None and piece.tool_call.index == self._index

    def opening(self) -> list[Fields]:
        return []

    def add(self, piece: Piece) -> list[Fields]:
        delta = piece.tool_call.arguments if piece.tool_call is not None else ""
        if not delta:  # the piece that gave the name
            return []
        self._parts.append(delta)
        return [{"type": "response.function_call_arguments.delta", "delta": delta}]

    def closing(self) -> list[Fields]:
        name = {"name": self._name}
        return [{"type": "response.function_call_arguments.done", "arguments": self.text, **name}]


JsonEvent = dict[str, Any]

_DEFAULTS: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class ResponseBuilder:
    """Builds one response. Each method makes a change and returns its events, with "type" and "sequence_number".

    Call `begin`, then `add` as pieces arrive, then `finish` or `fail`. Without streaming, ignore the events and use
    `response` at the end.
    """

    def __init__(self, request: Mapping[str, Any], *, model: str) -> None:
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._model = model
        self._echoed = {
            name: default if request.get(name) is None else request[name] for name, default in _DEFAULTS.items()
        }
        self._status = "in_progress"
        self._incomplete_details: dict[str, str] | None = None
        self._error: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._items: list[Item] = []
        self._num_events = 0

    def begin(self) -> list[JsonEvent]:
        """Return the events of the response's start."""
        return [self._event(f"response.{what}", response=self.response()) for what in ("created", "in_progress")]

    def add(self, pieces: Iterable[Piece]) -> list[JsonEvent]:
        """Append pieces of the answer and return their events."""
        return [event for piece in pieces for event in self._add(piece)]

    def finish(
        self, finish_reason: Literal["stop", "length", "tool_calls"], usage: Mapping[str, Any]
    ) -> list[JsonEvent]:
        """End the answer and return the events. `usage` is in the form of chat completions."""
        is_complete = finish_reason != "length"
        events = self._close("completed" if is_complete else "incomplete")
        self._usage = _usage(usage)
        if is_complete:
            self._status = "completed"
            self._completed_at = int(time.time())
        else:
            self._status = "incomplete"
            self._incomplete_details = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{self._status}", response=self.response())]

    def fail(self, message: str, code: Literal["server_error", "invalid_prompt"] = "server_error") -> list[JsonEvent]:
        """Mark the answer as failed and return the event."""
        for item in self._items[-1:]:
            item.status = "incomplete" if item.status == "in_progress" else item.status
        self._status = "failed"
        self._error = {"code": code, "message": message}
        return [self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        """Return the current Response object."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": self._incomplete_details,
            "model": self._model,
            "output": [item.snapshot() for item in self._items],
            "usage": self._usage,
            **self._echoed,
        }

    def _add(self, piece: Piece) -> Iterator[JsonEvent]:
        item = self._items[-1] if self._items else None
        if item is None or not item.continues_with(piece):
            yield from self._close("completed")
            item = _new_item(piece)
            yield self._item_event("added", item, len(self._items))
            self._items.append(item)
            yield from self._item_events(item.opening())
        yield from self._item_events(item.add(piece))

    def _close(self, status: Literal["completed", "incomplete"]) -> list[JsonEvent]:
        if not self._items:
            return []
        item = self._items[-1]
        events = self._item_events(item.closing())
        item.status = status
        return [*events, self._item_event("done", item, len(self._items) - 1)]

    def _item_event(self, what: str, item: Item, output_index: int) -> JsonEvent:
        return self._event(f"response.output_item.{what}", output_index=output_index, item=item.snapshot())

    def _item_events(self, events: Iterable[JsonEvent]) -> list[JsonEvent]:
        output_index = len(self._items) - 1
        item_id = self._items[-1].id
        return [self._event(output_index=output_index, item_id=item_id, **event) for event in events]

    def _event(self, type: str, **fields: Any) -> JsonEvent:
        event = {"type": type, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def _new_item(piece: Piece) -> Item:
    if piece.tool_call is not None:
        return CallItem(piece.tool_call)
    return ReasoningItem() if piece.reasoning else TextItem()


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token counts of a chat completion under the names of a Response."""
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


class ResponsesWriter:
    """Writes the answer to one Responses request, whose conversation is `chat`."""

    names_events = True
    has_sound = False

    def __init__(self, request: Mapping[str, Any], chat: ChatBody, model: ModelInfo, history: ResponseHistory) -> None:
        self._request = request
        self._chat = chat
        self._model = model
        self._history = history
        self._builder = ResponseBuilder(request, model=model.name)
        self._parser: OutputParser | None = None
        self._is_cut = False  # by max_output_tokens

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        """Record an event of the engine and yield its stream events."""
        if isinstance(event, Started):
            self._parser = make_output_parser(self._chat, self._model, event.opens_reasoning)
            yield from self._builder.begin()
        elif isinstance(event, AnswerDelta):
            assert self._parser is not None, "a delta came before Started"
            yield from self._builder.add(self._parser.push(event.text))
            if event.finish_reason is not None:
                yield from self._builder.add(self._parser.finish())
                self._is_cut = event.finish_reason == "length"
        else:
            yield from self._builder.finish("length" if self._is_cut else "stop", usage([event]))
            self._history.keep(self._request, self._builder.response())

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        """Return no chunks: the last event is sent with the end of the answer."""
        return iter(())

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the events of a failed answer."""
        if self._parser is None:
            yield from self._builder.begin()
        yield from self._builder.fail(error.message)

    def result(self) -> dict[str, Any]:
        """Return the complete answer."""
        return self._builder.response()
