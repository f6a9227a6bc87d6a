"""Splits the text of an answer into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.server.output.cursor import Cursor, Ends, Steps
from tilewright.server.output.format import ToolFormat
from tilewright.server.output.pieces import Output, Piece
from tilewright.server.output.reasoning import read_reasoning
from tilewright.server.output.tools import parameters_by_name


class OutputParser:
    """Parses one answer. The joined pieces are the same wherever its text is cut.

    `tools` are those the answer may call, and have passed `check_tools`; without any, or without a format, everything
    after the reasoning is content. `opens_reasoning`: the prompt ends inside the reasoning. `splits_reasoning`:
    reasoning is returned separately; else it is content, in which calls are not looked for either.
    """

    def __init__(
        self, *, tool_format: ToolFormat | None, tools: Sequence[Mapping], opens_reasoning: bool, splits_reasoning: bool
    ) -> None:
        self._tool_format = tool_format if tools else None
        self._tools = parameters_by_name(tools)
        self._text = Cursor()
        self._output = Output(expects_calls=self._tool_format is not None)
        self._steps = self._read(opens_reasoning, splits_reasoning)

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun; if so, the finish reason of a complete answer is "tool_calls"."""
        return self._output.num_calls > 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain with this much more text."""
        self._text.push(text)
        next(self._steps, None)
        return self._output.take()

    def finish(self) -> list[Piece]:
        """The rest, at the end of the answer."""
        self._text.end()
        next(self._steps, None)
        self._output.end()
        return self._output.take()

    def _read(self, opens_reasoning: bool, splits_reasoning: bool) -> Steps[None]:
        yield from read_reasoning(self._text, self._output, is_open=opens_reasoning, splits=splits_reasoning)
        if self._tool_format is None:
            yield from self._text.read_until(Ends(), self._output.content)
        else:
            yield from self._tool_format.read(self._text, self._output, self._tools)
