"""Parses the text that a model generates, and makes grammars that force a tool call."""

from tilewright.server.output.parser import OutputParser, has_reasoning, tool_syntax_of
from tilewright.server.output.pieces import Piece, ToolCallDelta
from tilewright.server.output.tools import ToolSyntax, check_tools, tool_constraint

__all__ = [
    "OutputParser",
    "Piece",
    "ToolCallDelta",
    "ToolSyntax",
    "check_tools",
    "has_reasoning",
    "tool_constraint",
    "tool_syntax_of",
]
