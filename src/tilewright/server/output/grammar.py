"""Building blocks for grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# As Python's json.dumps writes, which is what templates show and models have learnt. White space is fixed: else a
# constrained model could generate blanks without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Tool:
    """A tool that a grammar may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    is_strict: bool = False  # refuse a schema that a grammar cannot express wholly


def literal(text: str) -> str:
    """The text and nothing else."""
    return json.dumps(text)


def json_of(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A JSON value that fits the schema; keywords that no grammar can express are ignored unless strict."""
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
    """The schema of parameters without additional properties, unless it mentions them.

    JSON schema would allow any others too, which is not what tools with a list of parameters mean.
    """
    says_otherwise = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if "properties" not in parameters or says_otherwise & set(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}
