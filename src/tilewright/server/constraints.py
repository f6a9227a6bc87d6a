"""The constraint on an answer: of a forced tool call, a response_format or structured_outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tilewright.server.bodies import ChatBody, CompletionBody, SamplingBody
from tilewright.server.errors import ApiError
from tilewright.server.link.backend import ModelInfo
from tilewright.server.output import ToolFormat, tool_constraint, tool_format_of
from tilewright.types import Constraint, RequestError


def chat_constraint(body: ChatBody, model: ModelInfo, allows_reasoning: bool) -> tuple[str, Constraint | None]:
    """The field that constrains the answer, for errors, and its constraint if there is one."""
    return _only(
        {
            "tools": _forced_call(body, model, allows_reasoning),
            "response_format": _response_format(body, allows_reasoning),
            **_structured_outputs(body, allows_reasoning),
        }
    )


def completion_constraint(body: CompletionBody) -> tuple[str, Constraint | None]:
    """The same of a completion request, which has no reasoning in front."""
    return _only({"response_format": _response_format(body, False), **_structured_outputs(body, False)})


def _only(constraints: Mapping[str, Constraint | None]) -> tuple[str, Constraint | None]:
    """The one constraint that is given, with its field; ApiError for two."""
    found = [(name, constraint) for name, constraint in constraints.items() if constraint is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(400, f"{names} constrain the answer, expected one of them", param=found[1][0])
    return found[0] if found else ("constraint", None)


def _forced_call(body: ChatBody, model: ModelInfo, allows_reasoning: bool) -> Constraint | None:
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    tools = body.plain_tools
    if not tools:
        raise ApiError(400, "tool_choice requires a call, but there are no tools", param="tool_choice")
    tool_format = model_tool_format(model)
    if tool_format is None:
        raise ApiError(400, f"{model.name} has no form for tool calls in its chat template", param="tool_choice")
    named = choice if isinstance(choice, str) else choice.model_dump()
    return tool_constraint(
        tool_format,
        tools,
        named,
        parallel=body.parallel_tool_calls and isinstance(choice, str),  # a named function is called once
        allows_reasoning=allows_reasoning,
    )


def _response_format(body: SamplingBody, allows_reasoning: bool) -> Constraint | None:
    given = body.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Constraint("json_schema", '{"type":"object"}', allows_reasoning)
    if given.json_schema is None:
        raise ApiError(400, "response_format has no json_schema", param="response_format")
    return Constraint("json_schema", json.dumps(given.json_schema.json_schema), allows_reasoning)


def _structured_outputs(body: SamplingBody, allows_reasoning: bool) -> dict[str, Constraint | None]:
    """Constraints by the field that has them: structured_outputs, or one of the older guided_*."""
    outputs = body.structured_outputs
    found: dict[str, Constraint | None] = {}
    if outputs is not None:
        given = {name: value for name, value in vars(outputs).items() if value is not None}
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise RequestError(f"structured_outputs has {names}, expected one of json, regex, choice and grammar")
        ((kind, value),) = given.items()
        found["structured_outputs"] = _structured(kind, value, "structured_outputs.choice", allows_reasoning)
    for kind in ("json", "regex", "choice", "grammar"):
        name = f"guided_{kind}"
        if (value := getattr(body, name)) is not None:
            found[name] = _structured(kind, value, name, allows_reasoning)
    return found


def _structured(kind: str, value: Any, name: str, allows_reasoning: bool) -> Constraint:
    if kind in ("json", "json_schema"):
        return Constraint("json_schema", value if isinstance(value, str) else json.dumps(value), allows_reasoning)
    if kind == "regex":
        return Constraint("regex", value, allows_reasoning)
    if kind == "choice":
        if not value or "" in value:
            raise RequestError(f"{name} is empty or has an empty text", param=name.split(".")[0])
        return Constraint("regex", "|".join(re.escape(text) for text in value), allows_reasoning)
    return Constraint("lark", value, allows_reasoning)


def model_tool_format(model: ModelInfo) -> ToolFormat | None:
    """How the model writes tool calls; None if its chat template has no form for them."""
    return None if model.template is None else tool_format_of(model.template)
