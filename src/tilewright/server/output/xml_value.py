"""Values written as plain text between tags: their JSON, and the grammar of the values that a schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from tilewright.server.output.cursor import Cursor, Ends, Steps
from tilewright.server.output.grammar import json_of, literal
from tilewright.server.output.pieces import Output
from tilewright.server.output.tools import kind_of, kinds_of, options_of
from tilewright.types import RequestError

CLOSING = "</parameter>"
_ENDS = Ends(f"\n{CLOSING}", CLOSING)  # the line break before the tag is no part of the value
_AFTER = f"\n{CLOSING}\n"
# Templates write scalars as Python does: True, False, None.
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def read_value(text: Cursor, output: Output, kinds: frozenset[str]) -> Steps[bool]:
    """Whether a value ended with its closing tag, which is read too; its JSON is added to the call's arguments.

    `kinds`: the JSON types its schema allows. A string is passed on as it comes, other values when they are complete.
    """
    yield from text.take_if("\n")
    if kinds <= {"string"}:
        output.arguments('"')
        end = yield from text.read_until(_ENDS, lambda piece: output.arguments(_dumps(piece)[1:-1]))
        if end:
            output.arguments('"')
    else:
        parts: list[str] = []
        end = yield from text.read_until(_ENDS, parts.append)
        value = "".join(parts)
        output.arguments(_as_json(value, kinds) if end else value)
    text.take(len(end))
    return bool(end)


def value_grammar(schema: object, root: Mapping[str, Any], *, is_strict: bool) -> tuple[str, list[str]]:
    """(a value with its closing tag, the rules of the terminals in it).

    Of a string's schema, enum, const, minLength and maxLength are enforced.
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
    """(name, rule) of text of the schema's length that does not contain the closing tag."""
    shortest, longest = (schema.get(key) for key in ("minLength", "maxLength"))
    bounds = [
        str(bound) if type(bound) is int and bound >= 0 else default
        for bound, default in ((shortest, "0"), (longest, ""))
    ]
    name = f"VALUE_{'_'.join(bounds)}"
    tag = CLOSING.replace("/", r"\/")
    return name, f"{name}: (/(?s:.{{{','.join(bounds)}}})/ & ~/(?s:.*){tag}(?s:.*)/) {literal(_AFTER)}"


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value written as text; a string if it is not JSON, or if the schema allows strings."""
    stripped = text.strip()
    candidate = _WORDS.get(stripped.lower(), stripped)
    try:
        kind = kind_of(json.loads(candidate, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _dumps(text)
    is_listed = kind in kinds - {"string"} or (kind == "integer" and "number" in kinds)
    return candidate if is_listed or "string" not in kinds else _dumps(text)


def _as_text(value: object) -> str:
    """A value as it is written between tags."""
    text = value if isinstance(value, str) else _dumps(value)
    if CLOSING in text:
        raise RequestError(
            f"a tool's parameter allows {text!r:.100}, expected no {CLOSING} in it: this model ends values so"
        )
    return text


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
