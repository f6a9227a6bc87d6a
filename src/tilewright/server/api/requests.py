"""Makes EngineRequests of a request's validated body, with the constraint that its tools or response_format need."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.inputs.chat_template import COMMON_ARGUMENTS
from tilewright.server.api.bodies import ChatBody, CompletionBody, SamplingBody
from tilewright.server.http.errors import ApiError
from tilewright.server.link.backend import EngineRequest, ModelInfo
from tilewright.server.output import ToolSyntax, check_tools, has_reasoning, tool_constraint, tool_syntax_of
from tilewright.types import Constraint, RequestError, SamplingParams


def chat_constraint(body: ChatBody, model: ModelInfo, allows_reasoning: bool) -> tuple[str, Constraint | None]:
    """Return the constraint of a chat's answer, if any, and the field that sets it, for errors."""
    return _only(
        {
            "tools": _forced_call(body, model, allows_reasoning),
            "response_format": _response_format(body, allows_reasoning),
            **_structured_outputs(body, allows_reasoning),
        }
    )


def completion_constraint(body: CompletionBody) -> tuple[str, Constraint | None]:
    """Return the constraint of a completion, if any, and the field that sets it. Completions have no reasoning."""
    return _only({"response_format": _response_format(body, False), **_structured_outputs(body, False)})


def _only(constraints: Mapping[str, Constraint | None]) -> tuple[str, Constraint | None]:
    """Return the only constraint and its field; raise ApiError for two constraints."""
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
    tool_syntax = model_tool_syntax(model)
    if tool_syntax is None:
        raise ApiError(400, f"{model.name} has no syntax for tool calls in its chat template", param="tool_choice")
    named = choice if isinstance(choice, str) else choice.model_dump()
    return tool_constraint(
        tool_syntax,
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
    """Return constraints by their field: structured_outputs, or one of the older guided_*."""
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


def model_tool_syntax(model: ModelInfo) -> ToolSyntax | None:
    """Return the syntax of the model's tool calls; None if its chat template has none."""
    return None if model.template is None else tool_syntax_of(model.template)


# Names that the template gets from elsewhere, or that the processor uses itself.
_RESERVED_ARGUMENTS = {
    "messages", "tools", "is_known", "budget", "add_generation_prompt", "continue_final_message", "self",
    "use_audio_in_video",
    *SamplingParams.__dataclass_fields__,
}  # fmt: skip
_SAMPLING = (
    "n", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop_token_ids", "min_tokens", "ignore_eos",
)  # fmt: skip


def chat_request(body: ChatBody, messages: Sequence[Mapping[str, Any]], model: ModelInfo) -> EngineRequest:
    """Make the EngineRequest of a chat request; `messages` are its messages with media as bytes."""
    _check_modalities(body, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs is given, expected logprobs: true with it", param="top_logprobs")
    sampling = _sampling(body)
    sampling["max_tokens"] = body.max_completion_tokens or body.max_tokens
    sampling["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if body.is_spoken:
        sampling["voice"] = (body.audio and body.audio.voice) or model.voices[0]
    check_tools(body.plain_tools)
    _check_history(body, messages, model)
    template_arguments = _template_arguments(body, model)
    # Reasoning precedes the constrained text unless it is off: then the prompt ends with an empty reasoning block.
    allows_reasoning = (
        model.template is not None
        and has_reasoning(model.template)
        and template_arguments.get("enable_thinking") is not False
    )
    constraint_field, sampling["constraint"] = chat_constraint(body, model, allows_reasoning)
    return EngineRequest(
        messages=messages,
        tools=body.tools_in_use or None,
        template_arguments=template_arguments,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=_continues(body),
        use_audio_in_video=body.mm_processor_kwargs is not None and body.mm_processor_kwargs.use_audio_in_video,
        sampling={name: value for name, value in sampling.items() if value is not None},
        names={"prompt": "messages", "constraint": constraint_field},
    )


def _check_modalities(body: ChatBody, model: ModelInfo) -> None:
    if body.modalities is not None and set(body.modalities) not in ({"text"}, {"text", "audio"}):
        message = f"modalities is {body.modalities}, expected text, or text and audio"
        raise ApiError(400, message, param="modalities")
    if not body.is_spoken:
        if body.audio is not None:
            raise ApiError(400, "audio is given, expected modalities with audio too", param="audio")
        return
    if not model.voices:
        raise ApiError(400, f"modalities has audio, but {model.name} does not speak", param="modalities")
    if body.stream and body.audio_format != "pcm16":
        raise ApiError(400, f"the format of a stream is {body.audio_format}, expected pcm16", param="audio.format")


def completion_requests(body: CompletionBody) -> list[EngineRequest]:
    """Make the EngineRequests of a completion request, one per prompt."""
    if body.suffix:
        raise ApiError(400, "suffix is not supported: the model does not fill in the middle", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is {body.best_of}, expected n, {body.n or 1}, or nothing", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, expected 1 or more without echo", param="max_tokens")
    sampling = _sampling(body)
    # The engine computes at least one token; with max_tokens 0 the answer omits it.
    sampling["max_tokens"] = max(1, body.max_tokens)
    sampling["logprobs"] = body.logprobs
    sampling["prompt_logprobs"] = body.logprobs if body.echo else None
    constraint_field, sampling["constraint"] = completion_constraint(body)
    more: dict[str, Any] = {
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "returns_prompt": body.echo,
        "names": {"prompt": "prompt", "constraint": constraint_field},
    }
    return [
        EngineRequest(text=one, **more) if isinstance(one, str) else EngineRequest(token_ids=one, **more)
        for one in body.prompts
    ]


def _sampling(body: SamplingBody) -> dict[str, Any]:
    sampling = {name: getattr(body, name) for name in _SAMPLING}
    sampling["top_k"] = 0 if body.top_k == -1 else body.top_k
    sampling["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.stop == "" or (sampling["stop"] and "" in sampling["stop"]):
        raise ApiError(400, "stop has an empty string, expected at least one character", param="stop")
    if body.logit_bias:
        sampling["logit_bias"] = _logit_bias(body.logit_bias)
    return sampling


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    for token_id, bias in given.items():
        if not re.fullmatch(r"0|[1-9]\d{0,8}", token_id, re.ASCII):
            raise ApiError(400, f"logit_bias has {token_id[:40]!r}, which is no token id", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            message = f"logit_bias[{token_id}] is {bias!r:.40}, expected -100 to 100"
            raise ApiError(400, message, param="logit_bias")
    return {int(token_id): float(bias) for token_id, bias in given.items()}


def _template_arguments(body: ChatBody, model: ModelInfo) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    for name in given:
        if name in _RESERVED_ARGUMENTS or not re.fullmatch(r"[A-Za-z]\w{0,63}", name):
            message = f"chat_template_kwargs has {name[:64]!r}, which is no argument of a chat template"
            raise ApiError(400, message, param="chat_template_kwargs")
        if name not in COMMON_ARGUMENTS and not _reads(model.template, name):
            message = f"chat_template_kwargs has {name!r}, which the chat template of {model.name} does not read"
            raise ApiError(400, message, param="chat_template_kwargs", code="unsupported_parameter")
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
        given.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.enable_thinking is not None:
        given["enable_thinking"] = body.enable_thinking
    return given


def _continues(body: ChatBody) -> bool:
    """Return whether the answer continues the last message."""
    if body.continue_final_message and "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true, expected one of them"
        raise ApiError(400, message, param="add_generation_prompt")
    return body.continue_final_message


def _reads(template: str | None, name: str) -> bool:
    """Return whether the chat template may read the variable `name`; True if the template is unknown."""
    return template is None or re.search(rf"\b{name}\b", template) is not None


def _check_history(body: ChatBody, messages: Sequence[Mapping[str, Any]], model: ModelInfo) -> None:
    """Raise ApiError for tools and tool calls that the chat template would omit from the prompt."""
    if body.tools_in_use and model_tool_syntax(model) is None:
        raise ApiError(400, f"{model.name} has no syntax for tool calls in its chat template", param="tools")
    if any(message.get("tool_calls") for message in messages) and "tool_calls" not in (model.template or ""):
        raise ApiError(400, f"{model.name} has no syntax for tool calls in its chat template", param="messages")
