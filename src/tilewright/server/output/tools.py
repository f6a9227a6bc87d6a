"""The tools of a request: their validation, the types their schemas allow, and the grammar that forces a call.

Grammars are in llguidance's dialect of Lark. A `ToolSyntax` parses calls and makes the grammar that forces them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.server.output.cursor import Cursor, Steps
from tilewright.server.output.pieces import PieceBuffer
from tilewright.types import Constraint, RequestError


class ToolSyntax(ABC):
    """The syntax in which a model writes tool calls: its parser and its grammar."""

    @abstractmethod
    def read(self, text: Cursor, output: PieceBuffer, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        """Read the answer after its reasoning. `tools`: schemas of parameters by tool name."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        """Return the rules of an answer that consists of a call of one of the tools (`parallel`: or several calls)."""


# The style of Python's json.dumps, which templates use and models have learnt. White space is fixed: otherwise a
# constrained model could generate blanks endlessly.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Tool:
    """A tool that a grammar may call."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    is_strict: bool = False  # refuse a schema that a grammar cannot express completely


def literal(text: str) -> str:
    """Return a grammar expression that matches exactly this text."""
    return json.dumps(text)


def json_of(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a grammar expression for JSON of this schema; unless strict, unsupported keywords are ignored."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_STYLE, 'lenient': not is_strict}})}"


def calls(separator: str | None) -> str:
    """Return the rule of the whole answer: calls with the separator between them (None: one call)."""
    return "start: call" if separator is None else f"start: call ({literal(separator)} call)*"


def any_call(tools: Sequence[Tool]) -> str:
    """Return a grammar expression for a call of one of the tools, whose rules are call_0, call_1, ..."""
    return "(" + " | ".join(f"call_{index}" for index in range(len(tools))) + ")"


def json_calls(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """Return the rules of the tools' calls, which are JSON objects."""
    rules = []
    for index, tool in enumerate(tools):
        beginning = literal(f'{{"name": "{tool.name}", "{arguments_key}": ')
        arguments = json_of(_closed(tool.parameters), is_strict=tool.is_strict)
        rules.append(f"call_{index}: {beginning} {arguments} {literal('}')}")
    return rules


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema without additional properties, unless it mentions them.

    JSON schema would allow all others too, which is not what a tool with a list of parameters means.
    """
    says_otherwise = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if "properties" not in parameters or says_otherwise & set(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}


NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MAX_TOOLS = 128  # OpenAI's limit
KINDS = ("string", "integer", "number", "boolean", "object", "array", "null")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def check_tools(tools: Sequence[Mapping]) -> None:
    """Raise RequestError unless each is {"type": "function", "function": {"name", ...}} with a unique name."""
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools is a {type(tools).__name__}, expected a list")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, expected at most {MAX_TOOLS}")
    names = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{where} is a {type(tool).__name__}, expected an object")
        if tool.get("type") != "function":
            raise RequestError(f'{where}.type is {tool.get("type")!r:.100}, expected "function"')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.function is {function!r:.100}, expected an object with a name")
        _check_function(function, f"{where}.function")
        if function["name"] in names:
            raise RequestError(f"{where}.function.name is {function['name']!r}, which an earlier tool has")
        names.add(function["name"])


def parameters_by_name(tools: Sequence[Mapping]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of parameters by tool name. The tools must have passed `check_tools`."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or NO_PARAMETERS for tool in tools}


def kinds_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty: any. `root` is the schema that references point into."""
    return frozenset(kind for option in options_of(schema, root) for kind in _own_kinds(option))


def options_of(schema: object, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schema's alternatives, with references resolved; a value matches one of them."""
    options: list[Mapping[str, Any]] = []
    pending, seen = deque([schema]), set()
    while pending:
        schema = pending.popleft()
        if not isinstance(schema, Mapping):
            options.append({})
        elif isinstance(pointer := schema.get("$ref"), str):
            if pointer not in seen:
                seen.add(pointer)
                pending.append(_resolve(pointer, root))
        elif isinstance(branches := schema.get("anyOf", schema.get("oneOf")), list):
            shared = {key: schema[key] for key in ("type",) if key in schema}
            pending.extend({**shared, **branch} if isinstance(branch, Mapping) else shared for branch in branches)
        elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and "type" not in schema:
            pending.extend(parts)
        else:
            options.append(schema)
            if schema.get("nullable") is True:
                options.append({"type": "null"})
    return options


def listing_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that lists the parameters: this one, or the first that it refers to and that lists them."""
    found = (option for option in options_of(parameters, parameters) if isinstance(option.get("properties"), Mapping))
    return parameters if "properties" in parameters else next(found, parameters)


def kind_of(value: object) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    by_type = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return by_type.get(type(value), "object")


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where}.name is {name!r:.100}, expected 1 to 64 letters, digits, _, - or .")
    for key, expected in (("description", str), ("strict", bool)):
        value = function.get(key)
        if value is not None and not isinstance(value, expected):
            raise RequestError(f"{where}.{key} is {value!r:.100}, expected a {expected.__name__}")
    parameters = function.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.parameters is {parameters!r:.100}, expected a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise RequestError(f'{where}.parameters.type is {parameters["type"]!r:.100}, expected "object"')
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"{where}.parameters.properties is {properties!r:.100}, expected an object")
    for key, schema in properties.items():
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"{where}.parameters.properties.{key} is {schema!r:.100}, expected a JSON schema")
    required = parameters.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(key, str) for key in required):
        raise RequestError(f"{where}.parameters.required is {required!r:.100}, expected a list of names")


def _own_kinds(schema: Mapping[str, Any]) -> set[str]:
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list | tuple) else [schema["type"]]
        return {kind for kind in named if kind in KINDS}
    if "const" in schema:
        return {kind_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list | tuple):
        return {kind_of(value) for value in values}
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()


def _resolve(pointer: str, root: Mapping[str, Any]) -> object:
    """Return the schema at a pointer such as "#/$defs/name"; None if there is none."""
    target: Any = root
    for name in pointer.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


MAX_NAMED = 5  # tools, in an error


def tool_constraint(
    syntax: ToolSyntax, tools: Sequence[Mapping], choice: str | Mapping, *, parallel: bool, allows_reasoning: bool
) -> Constraint:
    """Return the constraint to calls of the chosen tools, in the model's syntax and with valid arguments.

    `choice` is OpenAI's tool_choice: "required", or {"type": "function", "function": {"name": ...}}. The tools must
    have passed `check_tools`. `parallel` allows several calls. The engine rejects schemas that no grammar can express.
    """
    chosen = _chosen(tools, choice)
    source = "\n".join(syntax.grammar(chosen, parallel=parallel)) + "\n"
    names = ", ".join(tool.name for tool in chosen[:MAX_NAMED])
    subject = f"the tool {names}" if len(chosen) == 1 else f"one of the tools {names}"
    return Constraint("lark", source, allows_reasoning, subject if len(chosen) <= MAX_NAMED else f"{subject}, ...")


def _chosen(tools: Sequence[Mapping], choice: str | Mapping) -> list[Tool]:
    strict_names = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    known = {
        name: Tool(name, parameters, is_strict=name in strict_names)
        for name, parameters in parameters_by_name(tools).items()
    }
    if choice == "required":
        if not known:
            raise RequestError('tool_choice is "required", expected at least one tool to choose from')
        return list(known.values())
    function: Any = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        expected = '"required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError(f"tool_choice is {choice!r:.100}, expected {expected}")
    name = function.get("name")
    if not isinstance(name, str) or name not in known:
        raise RequestError(
            f"tool_choice names {name!r:.100}, expected one of the tools: {', '.join(known) or 'there are none'}"
        )
    return [known[name]]
