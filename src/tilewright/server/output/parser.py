"""Splits the text of an answer into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tilewright.server.output.cursor import Cursor, Ends, HeldEnd, Steps
from tilewright.server.output.json_syntax import HermesSyntax, LlamaSyntax
from tilewright.server.output.pieces import Piece, PieceBuffer
from tilewright.server.output.qwen_xml import QwenXmlSyntax
from tilewright.server.output.tools import ToolSyntax, parameters_by_name
from tilewright.types import REASONING_TAGS

_QUOTE = r"\\?[\"']"  # may be escaped, in a template's strings
_NAME = re.compile(rf"{_QUOTE}name{_QUOTE}\s*:")
_ARGUMENTS = re.compile(rf"{_QUOTE}arguments{_QUOTE}\s*:")
_LLAMA = re.compile(rf"\{{\s*{_QUOTE}name{_QUOTE}.{{1,40}}{_QUOTE}parameters{_QUOTE}\s*:")
_LLAMA_HEADERS = ("<|start_header_id|>", "<|header_start|>")
_ONE_CALL_ALONE = re.compile(r"tool_calls\s*\|\s*length\s*[!=]=\s*1")


def tool_syntax_of(template_source: str) -> ToolSyntax | None:
    """Return the syntax in which a chat template writes tool calls; None if it has none, or an unknown one."""
    if "<function=" in template_source and "<parameter=" in template_source:
        return QwenXmlSyntax()
    if "<tool_call>" in template_source and _NAME.search(template_source) and _ARGUMENTS.search(template_source):
        return HermesSyntax()
    if _LLAMA.search(template_source) and any(header in template_source for header in _LLAMA_HEADERS):
        return LlamaSyntax(takes_several=not _ONE_CALL_ALONE.search(template_source))
    return None


_OPENING, _CLOSING = REASONING_TAGS
_ENDS = Ends(_CLOSING)


def has_reasoning(template_source: str) -> bool:
    """Return whether answers of a model with this chat template may begin with reasoning."""
    return _CLOSING in template_source


def read_reasoning(text: Cursor, output: PieceBuffer, *, is_open: bool, splits: bool) -> Steps[None]:
    """Read the reasoning, up to the beginning of the content.

    It begins at once if the prompt has opened it (`is_open`; a second opening tag is then dropped), else with a tag
    that only white space precedes. Line breaks beside the tags are dropped. Without `splits`, all of it is content,
    tags included.
    """
    space = yield from text.read_space()
    has_tag = yield from text.read_if(_OPENING)
    if not has_tag and not is_open:
        output.content(space)
    elif splits:
        space = (yield from text.read_space()) if has_tag else space
        yield from _split(text, output, space.lstrip("\n"))
    else:
        output.content(space + _OPENING if has_tag else space)
        if (yield from text.read_until(_ENDS, output.content)):
            output.content(text.read(len(_CLOSING)))


def _split(text: Cursor, output: PieceBuffer, beginning: str) -> Steps[None]:
    held = HeldEnd("\n")
    output.reasoning(held.push(beginning))
    if (yield from text.read_until(_ENDS, lambda piece: output.reasoning(held.push(piece)))):
        text.read(len(_CLOSING))
        yield from text.read_all("\n")
    else:
        output.reasoning(held.release())


class OutputParser:
    """Parses one answer. The joined pieces do not depend on where its text is cut.

    `tools` are the tools it may call, checked by `check_tools`; without tools or without a syntax, everything
    after the reasoning is content. `opens_reasoning`: the prompt ends inside the reasoning. `splits_reasoning`:
    reasoning is returned separately; else it is content, which is not searched for calls.
    """

    def __init__(
        self, *, tool_syntax: ToolSyntax | None, tools: Sequence[Mapping], opens_reasoning: bool, splits_reasoning: bool
    ) -> None:
        self._tool_syntax = tool_syntax if tools else None
        self._tools = parameters_by_name(tools)
        self._text = Cursor()
        self._output = PieceBuffer(expects_calls=self._tool_syntax is not None)
        self._steps = self._read(opens_reasoning, splits_reasoning)

    @property
    def has_tool_calls(self) -> bool:
        """True if a call has begun: then the finish reason of a complete answer is "tool_calls"."""
        return self._output.num_calls > 0

    def push(self, text: str) -> list[Piece]:
        """Append text; return the pieces that are certain now."""
        self._text.push(text)
        next(self._steps, None)
        return self._output.flush()

    def finish(self) -> list[Piece]:
        """End the answer; return the remaining pieces."""
        self._text.end()
        next(self._steps, None)
        self._output.end()
        return self._output.flush()

    def _read(self, opens_reasoning: bool, splits_reasoning: bool) -> Steps[None]:
        yield from read_reasoning(self._text, self._output, is_open=opens_reasoning, splits=splits_reasoning)
        if self._tool_syntax is None:
            yield from self._text.read_until(Ends(), self._output.content)
        else:
            yield from self._tool_syntax.read(self._text, self._output, self._tools)
