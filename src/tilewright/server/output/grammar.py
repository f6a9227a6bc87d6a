"""The parts that grammars of tool calls are made of, in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# As Python's json.dumps writes, and hence what templates show and models have learnt. One way of writing, not any
# white space: a model that is forced could go on with blanks for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Tool:
    """A tool that a grammar may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    is_strict: bool = False  # whether a schema that a grammar cannot hold to wholly is refused


def literal(text: str) -> str:
    """The text and nothing else."""
    return json.dumps(text)


def json_of(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A JSON value that fits the schema; what no grammar can hold to is left out unless strict."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_STYLE, 'lenient': not is_strict}})}"


def calls(separator: str | None) -> str:
    """The rule of the whole answer: calls with the separator between them; None: one call."""
    return "start: call" if separator is None else f"start: call ({literal(separator)} call)*"


def any_call(tools: Sequence[Tool]) -> str:
    """A call of one of the tools, whose own rules are call_0, call_1, ..."""
    return "(" + " | ".join(f"call_{index}" for index in range(len(tools))) + ")"


def json_calls(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """The rules of the tools' own calls, which are JSON objects."""
    rules = []
    for index, tool in enumerate(tools):
        beginning = literal(f'{{"name": "{tool.name}", "{arguments_key}": ')
        arguments = json_of(_closed(tool.parameters), is_strict=tool.is_strict)
        rules.append(f"call_{index}: {beginning} {arguments} {literal('}')}")
    return rules


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of parameters, which are those it lists and no others unless it says otherwise.

    JSON schema would admit any others too, and no one who lists parameters means that.
    """
    says_otherwise = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if "properties" not in parameters or says_otherwise & set(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}
