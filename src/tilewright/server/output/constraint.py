"""The grammar that makes an answer a tool call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from tilewright.server.output.format import ToolFormat
from tilewright.server.output.grammar import Tool, json_of
from tilewright.server.output.tools import parameters_by_name
from tilewright.types import Constraint, RequestError

if TYPE_CHECKING:
    from tilewright.engine.constraint_trial import Trial

MAX_CHECKED = 256  # grammars that are known to be good: agents send the same tools with every turn


def tool_constraint(
    format: ToolFormat, tools: Sequence[Mapping], choice: str | Mapping, *, parallel: bool, allows_reasoning: bool
) -> Constraint:
    """What holds an answer to calls of the chosen tools, in the format's own form, with arguments that fit.

    `choice` is OpenAI's tool_choice: "required", or {"type": "function", "function": {"name": ...}}. The tools have
    passed `check_tools`. `parallel` admits several calls.
    """
    chosen = _chosen(tools, choice)
    for tool in chosen:
        schema = json_of(tool.parameters, is_strict=tool.is_strict)
        _check(f"start: {schema}", f"the parameters of the tool {tool.name!r}")
    source = "\n".join(format.grammar(chosen, parallel=parallel)) + "\n"
    _check(source, f"the tools {', '.join(tool.name for tool in chosen)}")
    return Constraint("lark", source, allows_reasoning=allows_reasoning)


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


@lru_cache(MAX_CHECKED)
def _check(grammar: str, what: str) -> None:
    """A `RequestError` that says why the grammar of this is none."""
    from llguidance import LLMatcher

    from tilewright.engine.constraint_grammar import GrammarError

    try:
        _trial().run(LLMatcher.grammar_from_lark(grammar))
    except GrammarError as error:
        reason = re.search(r"failed to compile JSON schema: (.*)", str(error))
        raise RequestError(f"{what} cannot be held to: {reason[1] if reason else str(error):.200}") from None


@cache
def _trial() -> Trial:
    """Where grammars are compiled: in a process that may come to harm, as a chain of references overflows a stack."""
    from tilewright.engine.constraint_trial import Trial

    end = 0
    return Trial(1, {end: "<end>"}, [end])
