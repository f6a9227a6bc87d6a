"""The grammar that makes an answer a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.server.output.format import ToolFormat
from tilewright.server.output.grammar import Tool
from tilewright.server.output.tools import parameters_by_name
from tilewright.types import Constraint, RequestError

MAX_NAMED = 5  # tools, in an error


def tool_constraint(
    format: ToolFormat, tools: Sequence[Mapping], choice: str | Mapping, *, parallel: bool, allows_reasoning: bool
) -> Constraint:
    """The constraint that makes an answer calls of the chosen tools, in the model's format, with valid arguments.

    `choice` is OpenAI's tool_choice: "required", or {"type": "function", "function": {"name": ...}}. The tools have
    passed `check_tools`. `parallel` allows several calls. The engine rejects schemas that no grammar can express.
    """
    chosen = _chosen(tools, choice)
    source = "\n".join(format.grammar(chosen, parallel=parallel)) + "\n"
    names = ", ".join(tool.name for tool in chosen[:MAX_NAMED])
    subject = f"the tool {names}" if len(chosen) == 1 else f"one of the tools {names}"
    return Constraint("lark", source, allows_reasoning, subject if len(chosen) <= MAX_NAMED else f"{subject}, ...")


def _chosen(tools: Sequence[Mapping], choice: str | Mapping) -> list[Tool]:
    strict_names = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    known = {
        name: Tool(name, parameters, is_strict=name in strict_names)
        for name, parameters in parameters_by_name(tools).items()
    }
    if choice == "required":
        if not known:
            raise RequestError('tool_choice is "required", expected at least one tool to choose from')
        return list(known.values())
    function: Any = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        expected = '"required" or {"type": "function", "function": {"name": ...}}'
        raise RequestError(f"tool_choice is {choice!r:.100}, expected {expected}")
    name = function.get("name")
    if not isinstance(name, str) or name not in known:
        raise RequestError(
            f"tool_choice names {name!r:.100}, expected one of the tools: {', '.join(known) or 'there are none'}"
        )
    return [known[name]]
