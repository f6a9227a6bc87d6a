"""Tool calls as Hermes, Qwen2.5, Qwen3 and Qwen3-VL write them: JSON within tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.server.output.cursor import Cursor, Ends, Steps
from tilewright.server.output.format import ToolFormat
from tilewright.server.output.grammar import Tool, any_call, calls, json_calls, literal
from tilewright.server.output.json_call import JsonCall
from tilewright.server.output.pieces import Output

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_ENDS = Ends(_OPENING)


@dataclass(frozen=True)
class HermesFormat(ToolFormat):
    """<tool_call>, {"name": ..., "arguments": {...}}, </tool_call>, each on a line of its own; several in a row."""

    def read(self, text: Cursor, output: Output, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        while (yield from text.read_until(_ENDS, output.content)):
            text.keep()
            text.take(len(_OPENING))
            yield from text.take_space()
            call = JsonCall(text, output, names=None)
            yield from call.read()
            if not call.has_begun:
                output.content_unless_cut(text)
                continue
            yield from text.take_space()
            yield from text.take_markup(_CLOSING)
            yield from text.take_space()
            yield from text.drop_cut(_ENDS)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        before, after = literal(f"{_OPENING}\n"), literal(f"\n{_CLOSING}")
        return [
            calls("\n" if parallel else None),
            f"call: {before} {any_call(tools)} {after}",
            *json_calls(tools, "arguments"),
        ]
