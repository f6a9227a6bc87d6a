"""Tool calls of Qwen3-Coder and Qwen3.5: a tag for the function, one for each parameter, plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tilewright.server.output.cursor import Cursor, Ends, Steps
from tilewright.server.output.pieces import PieceBuffer
from tilewright.server.output.tools import (
    NAME,
    Tool,
    ToolSyntax,
    any_call,
    calls,
    json_of,
    kind_of,
    kinds_of,
    listing_of,
    literal,
    options_of,
)
from tilewright.types import RequestError

CLOSING = "</parameter>"
_VALUE_ENDS = Ends(f"\n{CLOSING}", CLOSING)  # the line break before the tag is not part of the value
_AFTER = f"\n{CLOSING}\n"
# Templates write scalars as Python does: True, False, None.
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def read_value(text: Cursor, output: PieceBuffer, kinds: frozenset[str]) -> Steps[bool]:
    """Read a value and its closing tag, and append the value's JSON to the call's arguments; return whether it ended.

    `kinds`: the JSON types its schema allows. A string is passed on as it arrives, other values when complete.
    """
    yield from text.read_if("\n")
    if kinds <= {"string"}:
        output.arguments('"')
        end = yield from text.read_until(_VALUE_ENDS, lambda piece: output.arguments(_dumps(piece)[1:-1]))
        if end:
            output.arguments('"')
    else:
        parts: list[str] = []
        end = yield from text.read_until(_VALUE_ENDS, parts.append)
        value = "".join(parts)
        output.arguments(_as_json(value, kinds) if end else value)
    text.read(len(end))
    return bool(end)


def value_grammar(schema: object, root: Mapping[str, Any], *, is_strict: bool) -> tuple[str, list[str]]:
    """Return a grammar expression of a value with its closing tag, and the rules of its terminals.

    For strings, enum, const, minLength and maxLength are enforced.
    """
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    kinds = kinds_of(schema, root)
    if isinstance(schema, Mapping) and kinds and "string" not in kinds:
        return f"{json_of({**schema, **definitions}, is_strict=is_strict)} {literal(_AFTER)}", []
    expansions: list[str] = []
    terminals: list[str] = []
    for option in options_of(schema, root):
        values = [option["const"]] if "const" in option else option.get("enum")
        if isinstance(values, list | tuple):
            expansions += [literal(_as_text(value) + _AFTER) for value in values]
            continue
        own_kinds = kinds_of(option, root)
        if not own_kinds or "string" in own_kinds:
            name, rule = _free_text(option)
            expansions.append(name)
            terminals.append(rule)
        if others := sorted(own_kinds - {"string"}):
            value = json_of({**option, **definitions, "type": others}, is_strict=is_strict)
            expansions.append(f"{value} {literal(_AFTER)}")
    return f"({' | '.join(expansions)})", terminals


def _free_text(schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and rule of a terminal: text of the schema's length without the closing tag."""
    shortest, longest = (schema.get(key) for key in ("minLength", "maxLength"))
    bounds = [
        str(bound) if type(bound) is int and bound >= 0 else default
        for bound, default in ((shortest, "0"), (longest, ""))
    ]
    name = f"VALUE_{'_'.join(bounds)}"
    tag = CLOSING.replace("/", r"\/")
    return name, f"{name}: (/(?s:.{{{','.join(bounds)}}})/ & ~/(?s:.*){tag}(?s:.*)/) {literal(_AFTER)}"


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value written as text: a string if the text is not JSON of a type that the schema lists."""
    stripped = text.strip()
    candidate = _WORDS.get(stripped.lower(), stripped)
    try:
        kind = kind_of(json.loads(candidate, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _dumps(text)
    is_listed = kind in kinds - {"string"} or (kind == "integer" and "number" in kinds)
    return candidate if is_listed or "string" not in kinds else _dumps(text)


def _as_text(value: object) -> str:
    """Return a value as written between tags."""
    text = value if isinstance(value, str) else _dumps(value)
    if CLOSING in text:
        raise RequestError(
            f"a tool's parameter allows {text!r:.100}, expected no {CLOSING} in it: that tag ends a value"
        )
    return text


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_CLOSING = "<function=", "</function>"
_PARAMETER = "<parameter="
_ENDS = Ends(_OPENING, _FUNCTION)
_NAME_ENDS = Ends(characters=r"[^a-zA-Z0-9_.-]")
_KEY_ENDS = Ends(">", "\n")


@dataclass(frozen=True)
class QwenXmlSyntax(ToolSyntax):
    """<tool_call>, <function=NAME>, then <parameter=KEY>, a value, </parameter> for each parameter, on separate lines.

    Models sometimes omit the outer tag: a <function=NAME> without it is a call if a tool has that name.
    """

    def read(self, text: Cursor, output: PieceBuffer, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        while tag := (yield from text.read_until(_ENDS, output.content)):
            text.mark()
            if tag == _OPENING:
                text.read(len(tag))
                yield from text.read_space()
            name = yield from _read_name(text)
            if name is None or (tag == _FUNCTION and name not in tools):
                output.content_unless_cut(text)
                continue
            text.unmark()
            output.begin_call(name)
            yield from _read_parameters(text, output, tools.get(name, {}))
            yield from text.read_space()
            yield from text.read_markup(_CLOSING)
            yield from text.read_space()
            yield from text.drop_cut(_ENDS)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        before, after = literal(f"{_OPENING}\n"), literal(f"\n{_CLOSING}")
        rules = [calls("\n" if parallel else None), f"call: {before} {any_call(tools)} {after}"]
        for index, tool in enumerate(tools):
            rules += _call_rules(tool, index)
        return list(dict.fromkeys(rules))  # calls share terminals


def _read_name(text: Cursor) -> Steps[str | None]:
    """Read the name in <function=NAME>; return None if it is malformed."""
    parts: list[str] = []
    if not (yield from text.read_markup(_FUNCTION)) or (yield from text.read_until(_NAME_ENDS, parts.append)) != ">":
        return None
    text.read(1)
    name = "".join(parts)
    return name if NAME.fullmatch(name) else None


def _read_parameters(text: Cursor, output: PieceBuffer, schema: Mapping[str, Any]) -> Steps[None]:
    """Read up to the function's end, or to where it is malformed: the arguments then end there."""
    listing = listing_of(schema)
    before = "{"
    while True:
        yield from text.read_space()
        if (yield from text.read_markup(_PARAMETER)):
            parts: list[str] = []
            if (yield from text.read_until(_KEY_ENDS, parts.append)) != ">":
                return
            text.read(1)
            key = "".join(parts)
            output.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            known = listing.get("properties", {}).get(key, listing.get("additionalProperties"))
            if not (yield from read_value(text, output, kinds_of(known, schema))):
                return
        elif (yield from text.read_markup(_FUNCTION_CLOSING)) or (yield from text.read_markup(_CLOSING)):
            output.arguments("{}" if before == "{" else "}")
            return
        else:
            return


def _call_rules(tool: Tool, index: int) -> list[str]:
    """Return the rules of one tool's call: parameters in the schema's order, optional ones may be omitted."""
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
