"""Fields that would change an answer and are not served: refused by name, so that nobody waits for what they mean.

They are OpenAI's own and those of other servers of open models. docs/clients/README.md tells what becomes of which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.server.errors import ApiError


@dataclass(frozen=True)
class Unserved:
    """Why a field is not served, and the values that ask for nothing beside null, false, 0 and what is empty."""

    reason: str
    harmless: tuple[Any, ...] = ()
    is_harmless_when_empty: bool = True

    def allows(self, value: object) -> bool:
        return value is None or value in self.harmless or (self.is_harmless_when_empty and not value)


_STRUCTURED = "structured_outputs has json, regex, choice and grammar (in Lark's form)"
_TOOLS = "tools and tool_choice are the names now"
_OUTPUT = "answers are text and tool calls"
_SAMPLER = "there is no such sampler here"
_TOKENS = "max_tokens is the name here"

UNSERVED: Mapping[str, Unserved] = {
    "functions": Unserved(_TOOLS),
    "function_call": Unserved(_TOOLS, ("none", "auto")),
    "audio": Unserved(_OUTPUT),
    "prediction": Unserved("what is to come cannot be given"),
    "web_search_options": Unserved("nothing is searched for"),
    "verbosity": Unserved("the model has no such setting", ("medium",)),
    "chat_template": Unserved("the model's own template is used; chat_template_kwargs has arguments for it"),
    "documents": Unserved("chat_template_kwargs takes what a template asks for"),
    "truncate_prompt_tokens": Unserved("prompts are not cut"),
    "prompt_logprobs": Unserved("/v1/completions gives them, with echo and logprobs", is_harmless_when_empty=False),
    "return_token_ids": Unserved(_OUTPUT),
    "return_tokens_as_token_ids": Unserved(_OUTPUT),
    "skip_special_tokens": Unserved("special tokens are never part of an answer", (True,), False),
    "include_stop_str_in_output": Unserved("stop strings are never part of an answer"),
    "add_special_tokens": Unserved("the tokenizer's own beginning is used", (True,), False),
    "include_reasoning": Unserved("thoughts are always told, in reasoning_content", (True,), False),
    "thinking_budget": Unserved("thoughts have no limit of their own"),
    "reasoning": Unserved("reasoning_effort is the name here"),
    "mm_processor_kwargs": Unserved("pictures and videos are prepared as the checkpoint says"),
    "cache_salt": Unserved("the prefix cache is not divided"),
    "bad_words": Unserved("logit_bias keeps tokens out"),
    "allowed_token_ids": Unserved("logit_bias and structured_outputs choose tokens"),
    "logits_processors": Unserved("no code of clients is run"),
    "guided_whitespace_pattern": Unserved("x-guidance within a schema sets it"),
    **dict.fromkeys(("grammar", "ebnf", "regex", "json_schema", "guided_decoding"), Unserved(_STRUCTURED)),
    **dict.fromkeys(("n_predict", "max_new_tokens"), Unserved(_TOKENS)),
    "use_beam_search": Unserved("answers are sampled"),
    "length_penalty": Unserved("answers are sampled", (1,)),
    # Ollama's names for samplers (mirostat, repeat_penalty, ...) are not here: Open WebUI sends them to every server.
    "typical_p": Unserved(_SAMPLER, (1,)),
    **dict.fromkeys(
        ("dry_multiplier", "xtc_probability", "top_n_sigma", "top_a", "dynatemp_range"),
        Unserved(_SAMPLER, (-1,)),
    ),
}
_CHAT_ALONE = {
    "best_of": Unserved("n answers are given, none is chosen", (1,)),
    "echo": Unserved(_OUTPUT),
    "add_special_tokens": Unserved("the chat template writes them all", (False,), False),
}
_IN_MESSAGES = {
    "function_call": Unserved("tool_calls is the name now"),
    "audio": Unserved("sounds are not kept here"),
    "prefix": Unserved("continue_final_message says so for the last message"),
}


def check_fields(given: Mapping[str, Any] | None, *, is_chat: bool = False) -> None:
    """ApiError for the first field that asks for something that is not served; `given`: those a body does not list."""
    table = {**UNSERVED, **_CHAT_ALONE} if is_chat else UNSERVED
    for name, value in (given or {}).items():
        if name in table and not table[name].allows(value):
            message = f"{name} is {value!r:.60}, which is not served: {table[name].reason}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")


def check_message(message: Mapping[str, Any], where: str) -> None:
    """The same for the fields of a message."""
    for name, unserved in _IN_MESSAGES.items():
        if not unserved.allows(message.get(name)):
            text = f"{where}.{name} is {message[name]!r:.60}, which is not served: {unserved.reason}"
            raise ApiError(400, text, param="messages", code="unsupported_parameter")
