"""Parses the text that a model generates, and makes the grammars that force a tool call."""

from tilewright.server.output.constraint import tool_constraint
from tilewright.server.output.detect import tool_format_of
from tilewright.server.output.format import ToolFormat
from tilewright.server.output.parser import OutputParser
from tilewright.server.output.pieces import Piece, ToolCallDelta
from tilewright.server.output.reasoning import has_reasoning
from tilewright.server.output.tools import check_tools

__all__ = [
    "OutputParser",
    "Piece",
    "ToolCallDelta",
    "ToolFormat",
    "check_tools",
    "has_reasoning",
    "tool_constraint",
    "tool_format_of",
]
