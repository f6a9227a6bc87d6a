"""Tool calls as Llama 3 writes them: an answer that is JSON and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.server.output.cursor import Cursor, Ends, Steps
from tilewright.server.output.format import ToolFormat
from tilewright.server.output.grammar import Tool, any_call, calls, json_calls
from tilewright.server.output.json_call import JsonCall
from tilewright.server.output.pieces import Output

_MARK = "<|python_tag|>"  # a special token, in the text only if special tokens are kept; optional


@dataclass(frozen=True)
class LlamaFormat(ToolFormat):
    """{"name": ..., "parameters": {...}} from the answer's beginning on; several with ; or a line break between.

    JSON whose name is no tool's is content, and so is everything after it.
    """

    takes_several: bool = True  # False: the template refuses messages with more than one call

    def read(self, text: Cursor, output: Output, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        has_called = False
        while True:
            text.keep()
            yield from text.take_space()
            if has_called and (yield from text.take_if(";")):
                yield from text.take_space()
            if has_called and not (yield from text.peek()):
                return
            yield from text.take_if(_MARK)
            yield from text.take_space()
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
