"""Turns the items of a Responses request into the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.server.api.fields import ITEM, PART, Rules, find_fault
from tilewright.types import RequestError

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_ITEM_FIELDS = {
    "message": ("type", "role", "content"),
    "reasoning": ("type", "content", "summary"),
    "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "name", "output"),
}
_PART_FIELDS = ("type", "text", "refusal", "image_url", "detail", "file_id", "input_audio")
# Types of text parts, and the key of the text.
_TEXT_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(items: Sequence[object]) -> list[dict[str, Any]]:
    """Return messages in the order of the items; reasoning, text and calls of one turn become one message."""
    turns = _Turns()
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise RequestError(f"{where} is a {type(item).__name__}, expected an object")
        kind = item.get("type") or "message"
        if isinstance(kind, str) and kind in _ITEM_FIELDS:
            _check_fields(item, where, ITEM, _ITEM_FIELDS[kind])
        if kind == "message":
            turns.add_message(item, where)
        elif kind == "reasoning":
            turns.add_reasoning(item, where)
        elif kind == "function_call":
            turns.add_call(item, where)
        elif kind == "function_call_output":
            turns.add_output(item, where)
        else:
            expected = "message, reasoning, function_call or function_call_output"
            raise RequestError(f"{where}.type is {kind!r:.100}, expected {expected}")
    return turns.messages()


class _Turns:
    """The messages of the items so far."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None  # the assistant's message, which later items may extend
        self._name_of_call: dict[str, str] = {}

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages, without reasoning that no text or call follows."""
        return [message for message in self._messages if "content" in message]

    def add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(f"{where}.role is {role!r:.100}, expected {', '.join(_ROLES)}")
        content = content_of(item.get("content"), f"{where}.content")
        if _ROLES[role] == "assistant":
            if not isinstance(content, str):
                raise RequestError(f"{where}.content has a medium, expected text alone from the assistant")
            answer = self._answer
            if answer is None or "content" in answer:
                answer = self._begin_answer()
            answer["content"] = content
            return
        self._answer = None
        self._messages.append({"role": _ROLES[role], "content": content})

    def add_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        reasoning = _text(item.get("content") or item.get("summary") or [], where, ("reasoning_text", "summary_text"))
        if not reasoning:  # encrypted, for example
            return
        answer = self._answer
        if answer is None or "content" in answer:
            answer = self._begin_answer()
        before = answer.get("reasoning_content")
        answer["reasoning_content"] = f"{before}\n{reasoning}" if before else reasoning

    def add_call(self, item: Mapping[str, Any], where: str) -> None:
        call_id, name, arguments = (_string(item, key, where) for key in ("call_id", "name", "arguments"))
        self._name_of_call[call_id] = name
        answer = self._answer or self._begin_answer()
        answer.setdefault("content", "")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        answer.setdefault("tool_calls", []).append(call)

    def add_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._name_of_call:
            raise RequestError(f"{where}.call_id is {call_id!r:.100}, expected the call_id of an earlier function_call")
        self._answer = None
        content = content_of(item.get("output"), f"{where}.output")
        message = {"role": "tool", "tool_call_id": call_id, "name": self._name_of_call[call_id], "content": content}
        self._messages.append(message)

    def _begin_answer(self) -> dict[str, Any]:
        self._answer = {"role": "assistant"}
        self._messages.append(self._answer)
        return self._answer


def content_of(content: object, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: text, or a list of parts if it has media."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} is {content!r:.100}, expected text or a list of parts")
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):  # templates of text-only models accept nothing but text
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is a {type(part).__name__}, expected an object")
    kind = _string(part, "type", where)
    if kind != "input_file":
        _check_fields(part, where, PART, _PART_FIELDS)
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": _string(part, _TEXT_TYPES[kind], where)}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise RequestError(f"{where}.file_id is given, expected image_url: this server stores no files")
        image_url = {"url": _string(part, "image_url", where), "detail": part.get("detail") or "auto"}
        return {"type": "image_url", "image_url": image_url}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    if kind == "input_file":
        raise RequestError(f"{where}.type is 'input_file', expected text, images and sounds: files are not supported")
    raise RequestError(f"{where}.type is {kind!r:.100}, expected input_text, input_image, input_audio or output_text")


def _check_fields(given: Mapping[str, Any], where: str, rules: Rules, fields: Sequence[str]) -> None:
    """Raise RequestError for a refused field of an item or a part."""
    fault = find_fault({name: value for name, value in given.items() if name not in fields}, rules, fields)
    if fault is not None:
        raise RequestError(f"{where}.{fault.message}", param="input", code=fault.code)


def _text(parts: object, where: str, kinds: Sequence[str]) -> str:
    if not isinstance(parts, list | tuple):
        raise RequestError(f"{where}.content is {parts!r:.100}, expected a list")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            raise RequestError(f"{where} has {part!r:.100}, expected a part of type {' or '.join(kinds)}")
    return "\n".join(_string(part, "text", where) for part in parts)


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{key} is {value!r:.100}, expected text")
    return value
