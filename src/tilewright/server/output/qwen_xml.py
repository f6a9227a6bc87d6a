"""Tool calls as Qwen3-Coder and Qwen3.5 write them: a tag for the function and one for each parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.server.output.cursor import Cursor, Ends, Steps
from tilewright.server.output.format import ToolFormat
from tilewright.server.output.grammar import Tool, any_call, calls, literal
from tilewright.server.output.pieces import Output
from tilewright.server.output.tools import NAME, kinds_of, listing_of
from tilewright.server.output.xml_value import read_value, value_grammar
from tilewright.types import RequestError

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_CLOSING = "<function=", "</function>"
_PARAMETER = "<parameter="
_ENDS = Ends(_OPENING, _FUNCTION)
_NAME_ENDS = Ends(characters=r"[^a-zA-Z0-9_.-]")
_KEY_ENDS = Ends(">", "\n")


@dataclass(frozen=True)
class QwenXmlFormat(ToolFormat):
    """<function=NAME> within <tool_call>, and in it <parameter=KEY>, the value, </parameter>, on lines of their own.

    Models sometimes omit the outer tag: a <function=NAME> without it is a call if a tool has that name.
    """

    def read(self, text: Cursor, output: Output, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        while tag := (yield from text.read_until(_ENDS, output.content)):
            text.keep()
            if tag == _OPENING:
                text.take(len(tag))
                yield from text.take_space()
            name = yield from _read_name(text)
            if name is None or (tag == _FUNCTION and name not in tools):
                output.content_unless_cut(text)
                continue
            text.forget()
            output.begin_call(name)
            yield from _read_parameters(text, output, tools.get(name, {}))
            yield from text.take_space()
            yield from text.take_markup(_CLOSING)
            yield from text.take_space()
            yield from text.drop_cut(_ENDS)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        before, after = literal(f"{_OPENING}\n"), literal(f"\n{_CLOSING}")
        rules = [calls("\n" if parallel else None), f"call: {before} {any_call(tools)} {after}"]
        for index, tool in enumerate(tools):
            rules += _call_rules(tool, index)
        return list(dict.fromkeys(rules))  # terminals are shared


def _read_name(text: Cursor) -> Steps[str | None]:
    """The name in <function=NAME>; None if it is malformed."""
    parts: list[str] = []
    if not (yield from text.take_markup(_FUNCTION)) or (yield from text.read_until(_NAME_ENDS, parts.append)) != ">":
        return None
    text.take(1)
    name = "".join(parts)
    return name if NAME.fullmatch(name) else None


def _read_parameters(text: Cursor, output: Output, schema: Mapping[str, Any]) -> Steps[None]:
    """Reads up to the function's end, or to where it is malformed: then the arguments stay as they are."""
    listing = listing_of(schema)
    before = "{"
    while True:
        yield from text.take_space()
        if (yield from text.take_markup(_PARAMETER)):
            parts: list[str] = []
            if (yield from text.read_until(_KEY_ENDS, parts.append)) != ">":
                return
            text.take(1)
            key = "".join(parts)
            output.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            known = listing.get("properties", {}).get(key, listing.get("additionalProperties"))
            if not (yield from read_value(text, output, kinds_of(known, schema))):
                return
        elif (yield from text.take_markup(_FUNCTION_CLOSING)) or (yield from text.take_markup(_CLOSING)):
            output.arguments("{}" if before == "{" else "}")
            return
        else:
            return


def _call_rules(tool: Tool, index: int) -> list[str]:
    """The rules of one tool's call: parameters in the schema's order, optional ones may be left out."""
    listing = listing_of(tool.parameters)
    required = listing.get("required", [])
    properties = dict(listing.get("properties", {}))
    properties.update({key: {} for key in required if key not in properties})
    sequence = [literal(f"{_FUNCTION}{tool.name}>\n")]
    rules = []
    for position, (key, schema) in enumerate(properties.items()):
        if not key or {">", "\n"} & set(key):
            raise RequestError(
                f"the tool {tool.name!r} has a parameter {key!r}, expected no > and no line break in its name"
            )
        name = f"{index}_{position}"
        value, terminals = value_grammar(schema, tool.parameters, is_strict=tool.is_strict)
        beginning = literal(f"{_PARAMETER}{key}>\n")
        rules += [f"parameter_{name}: {beginning} {value}", *terminals]
        sequence.append(f"parameter_{name}{'' if key in required else '?'}")
    return [f"call_{index}: {' '.join(sequence)} {literal(_FUNCTION_CLOSING)}", *rules]
