"""Fields that would change an answer and are not supported: requests with them are refused by name.

They are OpenAI's own and those of other servers of open models. docs/clients/README.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.server.errors import ApiError


@dataclass(frozen=True)
class Unsupported:
    """Why a field is not supported, and the values beside null, false, 0 and empty ones that are harmless."""

    reason: str
    harmless: tuple[Any, ...] = ()
    is_harmless_when_empty: bool = True

    def allows(self, value: object) -> bool:
        return value is None or value in self.harmless or (self.is_harmless_when_empty and not value)


_STRUCTURED = "structured_outputs has json, regex, choice and grammar (in Lark's form)"
_TOOLS = "use tools and tool_choice"
_OUTPUT = "answers are text and tool calls"
_SAMPLER = "this server has no such sampler"
_TOKENS = "use max_tokens"

UNSUPPORTED: Mapping[str, Unsupported] = {
    "functions": Unsupported(_TOOLS),
    "function_call": Unsupported(_TOOLS, ("none", "auto")),
    "audio": Unsupported("/v1/chat/completions speaks its answers"),
    "prediction": Unsupported("predicted outputs are not used"),
    "web_search_options": Unsupported("this server does not search the web"),
    "verbosity": Unsupported("the model has no such setting", ("medium",)),
    "chat_template": Unsupported("the model's own template is used; pass its arguments in chat_template_kwargs"),
    "documents": Unsupported("pass what the template needs in chat_template_kwargs"),
    "truncate_prompt_tokens": Unsupported("prompts are not truncated"),
    "prompt_logprobs": Unsupported("/v1/completions gives them, with echo and logprobs", is_harmless_when_empty=False),
    "return_token_ids": Unsupported(_OUTPUT),
    "return_tokens_as_token_ids": Unsupported(_OUTPUT),
    "skip_special_tokens": Unsupported("special tokens are never part of an answer", (True,), False),
    "include_stop_str_in_output": Unsupported("stop strings are never part of an answer"),
    "add_special_tokens": Unsupported("the tokenizer's own special tokens are used", (True,), False),
    "include_reasoning": Unsupported("reasoning is always returned, in reasoning_content", (True,), False),
    "thinking_budget": Unsupported("reasoning has no limit of its own"),
    "reasoning": Unsupported("use reasoning_effort"),
    "mm_processor_kwargs": Unsupported("pictures and videos are preprocessed as the checkpoint says"),
    "cache_salt": Unsupported("the prefix cache is shared by all requests"),
    "bad_words": Unsupported("use logit_bias"),
    "allowed_token_ids": Unsupported("use logit_bias or structured_outputs"),
    "logits_processors": Unsupported("code of clients is not run"),
    "guided_whitespace_pattern": Unsupported("set it with x-guidance in the schema"),
    **dict.fromkeys(("grammar", "ebnf", "regex", "json_schema", "guided_decoding"), Unsupported(_STRUCTURED)),
    **dict.fromkeys(("n_predict", "max_new_tokens"), Unsupported(_TOKENS)),
    "use_beam_search": Unsupported("answers are sampled"),
    "length_penalty": Unsupported("answers are sampled", (1,)),
    # Ollama's names for samplers (mirostat, repeat_penalty, ...) are not here: Open WebUI sends them to every server.
    "typical_p": Unsupported(_SAMPLER, (1,)),
    **dict.fromkeys(
        ("dry_multiplier", "xtc_probability", "top_n_sigma", "top_a", "dynatemp_range"),
        Unsupported(_SAMPLER, (-1,)),
    ),
}
_CHAT_ALONE = {
    "best_of": Unsupported("all n answers are returned", (1,)),
    "echo": Unsupported(_OUTPUT),
    "add_special_tokens": Unsupported("the chat template writes them all", (False,), False),
}
_IN_MESSAGES = {
    "function_call": Unsupported("use tool_calls"),
    "audio": Unsupported("this server stores no sounds"),
    "prefix": Unsupported("use continue_final_message"),
}


def check_fields(given: Mapping[str, Any] | None, *, is_chat: bool = False) -> None:
    """ApiError for the first unsupported field; `given` are the fields that the body's class does not declare."""
    table = {**UNSUPPORTED, **_CHAT_ALONE} if is_chat else UNSUPPORTED
    for name, value in (given or {}).items():
        if name in table and not table[name].allows(value):
            message = f"{name} is {value!r:.60}, which is not supported: {table[name].reason}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")


def check_message(message: Mapping[str, Any], where: str) -> None:
    """The same for the fields of a message."""
    for name, unsupported in _IN_MESSAGES.items():
        if not unsupported.allows(message.get(name)):
            text = f"{where}.{name} is {message[name]!r:.60}, which is not supported: {unsupported.reason}"
            raise ApiError(400, text, param="messages", code="unsupported_parameter")
