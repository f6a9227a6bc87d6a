"""Tool calls in JSON: within tags (Hermes, Qwen2.5, Qwen3, Qwen3-VL) or bare (Llama 3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.server.output.cursor import SPACE, Cursor, Ends, Steps
from tilewright.server.output.pieces import PieceBuffer
from tilewright.server.output.tools import NAME, Tool, ToolSyntax, any_call, calls, json_calls, literal

_ARGUMENT_KEYS = ("arguments", "parameters")
_STRUCTURE = Ends('"', "{", "}", "[", "]", "<")
_STRING_ENDS = Ends('"', "\\")
_SCALAR_ENDS = Ends(*SPACE, ",", "}", "]", "<")

EmitText = Callable[[str], object]


class JsonCall:
    """Reads {"name": ..., "arguments": {...}}, keys in either order; the arguments' text is passed on unchanged.

    `names` is for formats without tags: the object is a call only if it has one of these names, and the call begins
    with its arguments. None: it is a call with any name, and begins with the name.
    """

    def __init__(self, text: Cursor, output: PieceBuffer, names: Container[str] | None) -> None:
        self._text = text
        self._output = output
        self._names = names
        self._name: str | None = None
        self._early_arguments: list[str] = []  # pieces that came before the name
        self._has_arguments = False
        self.has_begun = False

    def read(self) -> Steps[None]:
        """Read the object, or up to where it is malformed; `has_begun` is then true if it was a call."""
        text = self._text
        if not (yield from text.read_if("{")):
            return
        while True:
            yield from text.read_space()
            if not (yield from self._read_member()):
                return
            yield from text.read_space()
            if not (yield from text.read_if(",")):
                break
        if (yield from text.read_if("}")) and self._name is not None:
            self._begin()
            if not self._has_arguments:
                self._output.arguments("{}")

    def _read_member(self) -> Steps[bool]:
        """Read a key and its value; return whether both are complete and the object can still be a call."""
        text = self._text
        key = yield from _read_string(text)
        yield from text.read_space()
        if key is None or not (yield from text.read_if(":")):
            return False
        yield from text.read_space()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENT_KEYS and not self._has_arguments:
            return (yield from self._read_arguments())
        if self._names is not None and key != "type":
            return False
        return (yield from _pass_value(text, lambda _: None))

    def _read_name(self) -> Steps[bool]:
        name = yield from _read_string(self._text)
        if name is None or not NAME.fullmatch(name) or (self._names is not None and name not in self._names):
            return False
        self._name = name
        if self._names is None or self._has_arguments:
            self._begin()
        return True

    def _read_arguments(self) -> Steps[bool]:
        self._has_arguments = True
        if self._name is None:
            return (yield from _pass_value(self._text, self._early_arguments.append))
        self._begin()
        return (yield from _pass_value(self._text, self._output.arguments))

    def _begin(self) -> None:
        if self.has_begun or self._name is None:
            return
        self.has_begun = True
        self._text.unmark()
        self._output.begin_call(self._name)
        self._output.arguments("".join(self._early_arguments))


def _read_string(text: Cursor) -> Steps[str | None]:
    """Read the string that comes next; return None if something else does."""
    parts: list[str] = []
    if (yield from text.peek()) != '"' or not (yield from _pass_string(text, parts.append)):
        return None
    try:
        return json.loads("".join(parts))
    except ValueError:
        return None


def _pass_value(text: Cursor, emit: EmitText) -> Steps[bool]:
    """Emit the text of a JSON value as it arrives; return whether the value is complete.

    Only strings, escapes and nesting are parsed, to find the end. A < outside of strings ends an incomplete value.
    """
    first = yield from text.peek()
    if first == '"':
        return (yield from _pass_string(text, emit))
    if first in ("", ",", "}", "]", "<"):
        return False
    if first not in ("{", "["):
        return (yield from text.read_until(_SCALAR_ENDS, emit)) not in ("", "<")
    depth = 0
    while (end := (yield from text.read_until(_STRUCTURE, emit))) not in ("", "<"):
        if end == '"':
            if not (yield from _pass_string(text, emit)):
                return False
            continue
        emit(text.read(1))
        depth += 1 if end in "{[" else -1
        if depth == 0:
            return True
    return False


def _pass_string(text: Cursor, emit: EmitText) -> Steps[bool]:
    """Emit the text of the string that begins here as it arrives; return whether it is complete."""
    emit(text.read(1))
    while end := (yield from text.read_until(_STRING_ENDS, emit)):
        emit(text.read(1))
        if end == '"':
            return True
        if (yield from text.peek()):  # the escaped character, which may be a quotation mark
            emit(text.read(1))
    return False


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_ENDS = Ends(_OPENING)


@dataclass(frozen=True)
class HermesSyntax(ToolSyntax):
    """<tool_call>, {"name": ..., "arguments": {...}}, </tool_call>, each on its own line; any number of calls."""

    def read(self, text: Cursor, output: PieceBuffer, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        while (yield from text.read_until(_ENDS, output.content)):
            text.mark()
            text.read(len(_OPENING))
            yield from text.read_space()
            call = JsonCall(text, output, names=None)
            yield from call.read()
            if not call.has_begun:
                output.content_unless_cut(text)
                continue
            yield from text.read_space()
            yield from text.read_markup(_CLOSING)
            yield from text.read_space()
            yield from text.drop_cut(_ENDS)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        before, after = literal(f"{_OPENING}\n"), literal(f"\n{_CLOSING}")
        return [
            calls("\n" if parallel else None),
            f"call: {before} {any_call(tools)} {after}",
            *json_calls(tools, "arguments"),
        ]


_MARK = "<|python_tag|>"  # a special token, in the text only if special tokens are kept; optional


@dataclass(frozen=True)
class LlamaSyntax(ToolSyntax):
    """{"name": ..., "parameters": {...}} at the beginning of the answer; several are separated by ; or a line break.

    JSON without the name of a tool is content, as is everything after it.
    """

    takes_several: bool = True  # False: the template refuses messages with more than one call

    def read(self, text: Cursor, output: PieceBuffer, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        has_called = False
        while True:
            text.mark()
            yield from text.read_space()
            if has_called and (yield from text.read_if(";")):
                yield from text.read_space()
            if has_called and not (yield from text.peek()):
                return
            yield from text.read_if(_MARK)
            yield from text.read_space()
            call = JsonCall(text, output, names=tools)
            yield from call.read()
            if not call.has_begun:
                output.content_unless_cut(text)
                yield from text.read_until(Ends(), output.content)
                return
            has_called = True

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        return [
            calls("; " if parallel and self.takes_several else None),
            f"call: {any_call(tools)}",
            *json_calls(tools, "parameters"),
        ]
