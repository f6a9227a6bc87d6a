"""Turns a Responses request, with the conversation before it, into the body of a chat completion."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.server.api.fields import RESPONSES_FORMAT, TOOL, find_fault
from tilewright.server.api.responses.items import messages_of
from tilewright.types import RequestError

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

# Fields with the same meaning in both interfaces. The last three rows are common in servers of open models.
_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "user",
    "seed", "stop", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs", "chat_template_kwargs", "enable_thinking",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
_CHOICES = ("none", "auto", "required")


def chat_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat completion that answers a Responses request; raise RequestError if it cannot.

    The input must already contain the items of `previous_response_id`.
    """
    include = request.get("include") or []
    if not isinstance(include, list | tuple):
        raise RequestError(f"include is {include!r:.100}, expected a list")
    if "message.output_text.logprobs" in include:
        reason = "use /v1/chat/completions for log-probabilities"
        raise RequestError(f"include has message.output_text.logprobs, which is not supported: {reason}")
    _check_metadata(request.get("metadata"))
    body = {name: request[name] for name in _SAME if request.get(name) is not None}
    body["messages"] = _messages(request)
    if request.get("max_output_tokens") is not None:
        body["max_completion_tokens"] = request["max_output_tokens"]
    if request.get("tools"):
        body["tools"] = _tools(request["tools"])
    if request.get("tool_choice") is not None:
        body["tool_choice"] = _tool_choice(request["tool_choice"])
    response_format = _response_format(_object(request, "text").get("format"))
    if response_format is not None:
        body["response_format"] = response_format
    effort = _object(request, "reasoning").get("effort")
    if effort is not None:
        body["reasoning_effort"] = effort
    return body


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = request.get("input")
    if isinstance(given, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": given}]
    elif isinstance(given, list | tuple):
        messages = messages_of(given)
    else:
        raise RequestError(f"input is {given!r:.100}, expected text or a list of items")
    if not messages:
        raise RequestError("input is empty, expected at least one message")
    instructions = request.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise RequestError(f"instructions is {instructions!r:.100}, expected text")
    system = [] if instructions is None else [instructions]
    # Many templates accept one system message, at the beginning.
    while messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        system.append(messages.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def _tools(tools: object) -> list[dict[str, Any]]:
    """Return the tools in the form of chat completions, with a function's fields under "function"."""
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools is a {type(tools).__name__}, expected a list")
    found = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise RequestError(
                f'tools[{index}].type is {kind!r:.100}, expected "function": no other tools are supported'
            )
        if "function" in tool:
            raise RequestError(f"tools[{index}] has function, expected name, description and parameters beside type")
        fault = find_fault({name: value for name, value in tool.items() if name in TOOL}, TOOL, ())
        if fault is not None:
            raise RequestError(f"tools[{index}].{fault.message}", param="tools", code=fault.code)
        function = {key: value for key, value in tool.items() if key not in ("type", *TOOL) and value is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: object) -> str | dict[str, Any]:
    if isinstance(choice, str) and choice in _CHOICES:
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    expected = f'{", ".join(_CHOICES)} or {{"type": "function", "name": ...}}'
    raise RequestError(f"tool_choice is {choice!r:.100}, expected {expected}")


def _response_format(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping):
        fields = ("type", "name", "schema", "strict") if kind == "json_schema" else ("type",)
        fault = find_fault({key: given[key] for key in given if key not in fields}, RESPONSES_FORMAT, fields)
        if fault is not None:
            raise RequestError(f"text.format.{fault.message}", param="text", code=fault.code)
    if isinstance(given, Mapping) and kind == "json_schema":
        if not isinstance(given.get("schema"), Mapping):
            raise RequestError(f"text.format.schema is {given.get('schema')!r:.100}, expected a JSON schema")
        keys = ("name", "description", "schema", "strict")
        return {"type": kind, "json_schema": {key: given[key] for key in keys if given.get(key) is not None}}
    if kind not in ("text", "json_object"):
        raise RequestError(f"text.format is {given!r:.100}, expected type text, json_object or json_schema")
    return {"type": kind}


def _object(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = request.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {value!r:.100}, expected an object")
    return value


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, Mapping) or not all(isinstance(value, str) for value in metadata.values()):
        raise RequestError(f"metadata is {metadata!r:.100}, expected an object of texts")
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise RequestError(f"metadata has {len(metadata)} entries, expected at most {MAX_METADATA_ENTRIES}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or len(value) > MAX_METADATA_VALUE_CHARACTERS:
            limits = f"{MAX_METADATA_KEY_CHARACTERS} and {MAX_METADATA_VALUE_CHARACTERS}"
            raise RequestError(
                f"metadata has a name of {len(key)} and a value of {len(value)} characters, expected at most {limits}"
            )


MAX_HISTORY_BYTES = 64 << 20


class ResponseHistory:
    """The items of recent responses, in memory; the least recently used are evicted above the limit."""

    def __init__(self, max_size_bytes: int = MAX_HISTORY_BYTES) -> None:
        self._max_size_bytes = max_size_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[str, tuple[list[object], int]] = OrderedDict()

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request with the items of the previous response before its input."""
        previous_id = request.get("previous_response_id")
        if previous_id is None:
            return dict(request)
        entry = self._entries.get(previous_id) if isinstance(previous_id, str) else None
        if entry is None:
            raise RequestError(f"previous_response_id is {previous_id!r:.100}, expected the id of a stored response")
        self._entries.move_to_end(previous_id)
        return {**request, "input": [*entry[0], *_items(request.get("input"))]}

    def keep(self, request: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Store the input and output of a response, unless the request has "store": false."""
        if request.get("store") is False or response["status"] not in ("completed", "incomplete"):
            return
        items = [*_items(request.get("input")), *response["output"]]
        size_bytes = len(json.dumps(items))
        if size_bytes > self._max_size_bytes:
            return
        self._entries[response["id"]] = items, size_bytes
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_size_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._size_bytes -= freed_bytes


def _items(given: object) -> Sequence[object]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list | tuple):
        return given
    raise RequestError(f"input is {given!r:.100}, expected text or a list of items")
