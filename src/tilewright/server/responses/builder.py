"""From pieces of an answer to a Response object and the events it is streamed as."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from tilewright.server.output import Piece
from tilewright.server.responses.output_items import CallItem, Item, ReasoningItem, TextItem

Event = dict[str, Any]

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
    """Builds one response. Each method returns the events of a change, with "type" and "sequence_number".

    Call `begin`, then `add` as pieces come, then `finish` or `fail`. Without streaming, ignore the events and take
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

    def begin(self) -> list[Event]:
        """The events of the response's start."""
        return [self._event(f"response.{what}", response=self.response()) for what in ("created", "in_progress")]

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """The events of more of the answer."""
        return [event for piece in pieces for event in self._add(piece)]

    def finish(self, finish_reason: Literal["stop", "length", "tool_calls"], usage: Mapping[str, Any]) -> list[Event]:
        """The events of the answer's end. `usage` as a chat completion has it."""
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

    def fail(self, message: str, code: Literal["server_error", "invalid_prompt"] = "server_error") -> list[Event]:
        """The event of an answer that failed."""
        for item in self._items[-1:]:
            item.status = "incomplete" if item.status == "in_progress" else item.status
        self._status = "failed"
        self._error = {"code": code, "message": message}
        return [self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        """The current Response object."""
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

    def _add(self, piece: Piece) -> Iterator[Event]:
        item = self._items[-1] if self._items else None
        if item is None or not item.continues_with(piece):
            yield from self._close("completed")
            item = _new_item(piece)
            yield self._item_event("added", item, len(self._items))
            self._items.append(item)
            yield from self._item_events(item.opening())
        yield from self._item_events(item.add(piece))

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        if not self._items:
            return []
        item = self._items[-1]
        events = self._item_events(item.closing())
        item.status = status
        return [*events, self._item_event("done", item, len(self._items) - 1)]

    def _item_event(self, what: str, item: Item, output_index: int) -> Event:
        return self._event(f"response.output_item.{what}", output_index=output_index, item=item.snapshot())

    def _item_events(self, events: Iterable[Event]) -> list[Event]:
        output_index = len(self._items) - 1
        item_id = self._items[-1].id
        return [self._event(output_index=output_index, item_id=item_id, **event) for event in events]

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"type": type, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def _new_item(piece: Piece) -> Item:
    if piece.tool_call is not None:
        return CallItem(piece.tool_call)
    return ReasoningItem() if piece.reasoning else TextItem()


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Chat's counts of tokens by the names they have in a Response."""
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
