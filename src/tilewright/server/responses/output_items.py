"""The items of a response: reasoning, text and function calls, and the events of their parts."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

from tilewright.server.output import Piece, ToolCallDelta

Fields = dict[str, Any]  # an event's own fields, with "type"; ResponseBuilder adds those of all events


class Item(ABC):
    """One item, as far as it is generated."""

    prefix: str  # of its id

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.status = "in_progress"
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self._parts)

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """The current item."""

    @abstractmethod
    def continues_with(self, piece: Piece) -> bool:
        """Whether the piece belongs to this item."""

    @abstractmethod
    def opening(self) -> list[Fields]:
        """The events between the item's own beginning and its first text."""

    @abstractmethod
    def add(self, piece: Piece) -> list[Fields]:
        """The events of a piece of it."""

    @abstractmethod
    def closing(self) -> list[Fields]:
        """The events between its last text and its own end."""


class _PartItem(Item):
    """An item whose text is in a content part."""

    event: str  # the name of its text's events

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
    """A message."""

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
    """Reasoning."""

    prefix = "rs"
    event = "reasoning_text"

    def snapshot(self) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "status": self.status, "content": self._content()}

    def continues_with(self, piece: Piece) -> bool:
        return bool(piece.reasoning)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem(Item):
    """A function call."""

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
