"""Fields of requests that no body declares: which have no effect, which are refused, and what to use instead.

No field is ignored silently: a field that the tables do not name is refused as unknown. The tables give the words of
error messages and, through `rows`, of docs/fields.md.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BRIEF = reprlib.Repr()  # repr would copy a value of 100 MB to show 60 characters of it
_BRIEF.maxstring = _BRIEF.maxother = 60
UNSUPPORTED, UNKNOWN = "unsupported_parameter", "unknown_parameter"  # OpenAI's codes


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer: why it is not supported or what to use, and the values that have no effect.

    Null has no effect, nor do false, 0 and empty values unless `is_harmless_when_empty` is false.
    """

    reason: str
    harmless: tuple[Any, ...] = ()
    is_harmless_when_empty: bool = True

    code = UNSUPPORTED

    def fault(self, value: object) -> str | None:
        """Return why the value is refused; None if it is accepted."""
        if value in self.harmless or (self.is_harmless_when_empty and not value):
            return None
        return f"which is not supported: {self.reason}"


@dataclass(frozen=True)
class NoEffect:
    """A field that is accepted and has no effect: its purpose, and the accepted values (empty: all)."""

    about: str
    values: tuple[str, ...] = ()

    code = "invalid_value"

    def fault(self, value: object) -> str | None:
        """Return why the value is refused; None if it is accepted."""
        if not self.values or value in self.values:
            return None
        return f"expected {', '.join(self.values)}"


Rule = Refused | NoEffect
Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class FieldFault:
    """A refused field: OpenAI's error code, and a message that begins with the field's name."""

    name: str
    message: str
    code: str


def find_fault(others: Mapping[str, Any] | None, rules: Rules, declared: Collection[str]) -> FieldFault | None:
    """Return the first refused field of `others`, the undeclared fields, or None. Fields that are null are ignored."""
    for name, value in (others or {}).items():
        if value is None:
            continue
        rule = rules.get(name)
        shown = f"{name[:100]} is {_BRIEF.repr(value)[:60]}"
        if rule is None:
            near = difflib.get_close_matches(name[:100], [*declared, *rules], 1, 0.8)
            hint = f"did you mean {near[0]}?" if near else "docs/fields.md lists what is supported"
            return FieldFault(name, f"{shown}, which is an unknown field: {hint}", UNKNOWN)
        if (fault := rule.fault(value)) is not None:
            return FieldFault(name, f"{shown}, {fault}", rule.code)
    return None


def rows(rules: Rules) -> Iterator[tuple[str, str]]:
    """Yield rows for the documentation: names that share a rule, and the rule's description; refused fields first."""
    names_of: dict[str, list[str]] = {}
    for name, rule in sorted(rules.items(), key=lambda item: (isinstance(item[1], NoEffect), item[0])):
        names_of.setdefault(_described(rule), []).append(name)
    for description, names in names_of.items():
        yield ", ".join(f"`{name}`" for name in names), description


def _described(rule: Rule) -> str:
    if isinstance(rule, NoEffect):
        values = f"; {', '.join(f'`{value}`' for value in rule.values)}" if rule.values else ""
        return f"without effect: {rule.about}{values}"
    harmless = " or ".join(f"`{json.dumps(value)}`" for value in rule.harmless)
    return f"refused: {rule.reason}" + (f"; accepted if it is {harmless}" if harmless else "")


def _each(rule: Rule, names: Iterable[str]) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_STRUCTURED = Refused("structured_outputs has json, regex, choice and grammar (in Lark's form)")
_TOOLS = "use tools and tool_choice"
_OUTPUT = Refused("answers are text and tool calls")
_SAMPLER = "this server has no such sampler"
_LENGTHS = ("num_predict", "n_predict", "max_length", "max_new_tokens", "max_tokens_to_sample")
_THINKING = Refused(
    'use chat_template_kwargs, such as {"enable_thinking": false}, or reasoning_effort', is_harmless_when_empty=False
)
_BESIDE = "pass its fields at the top level, by their names here"
_FIXED = Refused("the server has one model, as it was started with")
_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")

# OpenAI's fields about the customer and the service, which do not change an answer.
SERVICE: Rules = {
    "user": NoEffect("identifies the client's user"),
    "safety_identifier": NoEffect("identifies the client's user"),
    "metadata": NoEffect("notes of the client"),
    "store": NoEffect("chats and completions are not stored"),
    "service_tier": NoEffect("all requests are treated equally", _TIERS),
    "prompt_cache_key": NoEffect("the prefix cache finds common beginnings by itself"),
    "prompt_cache_retention": NoEffect("the prefix cache keeps what there is memory for", ("in_memory", "24h")),
    "prompt_cache_options": NoEffect("the prefix cache keeps what there is memory for"),
}

ANSWERS: Rules = {
    **SERVICE,
    **_each(Refused(_TOOLS), ("functions",)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "prediction": Refused("predicted outputs are not used"),
    "web_search_options": Refused("this server does not search the web"),
    "moderation": Refused("answers are not moderated"),
    "access_programs": Refused("this server has no programs"),
    "verbosity": Refused("the model has no such setting: ask for it in a message", ("medium",)),
    # vLLM, SGLang and text-generation servers
    "chat_template": Refused("the model's own template is used; pass its arguments in chat_template_kwargs"),
    "documents": Refused("pass what the template needs in chat_template_kwargs"),
    "truncate_prompt_tokens": Refused("prompts are not truncated"),
    "prompt_logprobs": Refused("/v1/completions gives them, with echo and logprobs", is_harmless_when_empty=False),
    **_each(
        _OUTPUT,
        ("return_token_ids", "return_tokens_as_token_ids", "return_hidden_states", "return_tokens",
         "return_progress", "timings_per_token", "post_sampling_probs"),
    ),
    "skip_special_tokens": Refused("special tokens are never part of an answer", (True,), False),
    "spaces_between_special_tokens": Refused("special tokens are never part of an answer", (True,)),
    "include_stop_str_in_output": Refused("stop strings are never part of an answer"),
    "no_stop_trim": Refused("stop strings are never part of an answer"),
    "add_special_tokens": Refused("the tokenizer's own special tokens are used", (True,), False),
    "include_reasoning": Refused("reasoning is always returned, in reasoning_content", (True,), False),
    "separate_reasoning": Refused("reasoning is always returned, in reasoning_content", (True,), False),
    "stream_reasoning": Refused("reasoning is streamed as it comes", (True,), False),
    "reasoning_format": Refused("reasoning is always returned, in reasoning_content", ("auto", "deepseek")),
    **_each(
        Refused("reasoning has no limit of its own"),
        ("thinking_budget", "thinking_token_budget", "reasoning_budget", "max_reasoning_tokens"),
    ),
    "reasoning": Refused("use reasoning_effort"),
    **_each(Refused("media are preprocessed as the checkpoint says"), ("mm_processor_kwargs", "media_io_kwargs")),
    "cache_salt": Refused("the prefix cache is shared by all requests"),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "bad_words": Refused("use logit_bias"),
    "allowed_token_ids": Refused("use logit_bias or structured_outputs"),
    "logits_processors": Refused("code of clients is not run"),
    "guided_whitespace_pattern": Refused("set it with x-guidance in the schema"),
    **_each(_STRUCTURED, ("grammar", "ebnf", "regex", "json_schema", "guided_decoding")),
    **_each(Refused("the server passes nothing on"), ("vllm_xargs", "kv_transfer_params", "session_params")),
    **_each(_FIXED, ("lora", "lora_path", "lora_request", "models", "control_vectors")),
    **_each(Refused("prompts are not changed"), ("transforms", "plugins")),
    # other names of supported fields, as in Ollama and llama.cpp
    **_each(Refused("use max_tokens"), _LENGTHS),
    **_each(Refused("use min_tokens"), ("min_length", "min_new_tokens")),
    **_each(Refused("use stop"), ("stop_sequences", "stop_strings", "stop_words", "stop_regex")),
    **_each(_THINKING, ("thinking", "think")),
    "system": Refused("use a message of role system"),
    "format": Refused("use response_format"),
    **_each(Refused(_BESIDE), ("options", "parameters", "extra_body")),
    "params": Refused(_BESIDE, ({"function_calling": "native"},)),
    "images": Refused("use parts of a message, such as image_url"),
    "files": Refused("files are not supported: use parts of a message"),
    "raw": Refused("/v1/completions takes prompts without a template"),
    "template": Refused("the model's own template is used"),
    "context": Refused("send all messages: the prefix cache saves their cost"),
    "n_probs": Refused("use logprobs and top_logprobs"),
    "repeat_penalty": Refused("use repetition_penalty", (1,)),
    "repeat_last_n": Refused("repetition_penalty counts all tokens", (-1,)),
    # samplers
    **_each(Refused("their order is fixed"), ("samplers", "sampler_seq", "sampler_order", "sampler_priority")),
    "do_sample": Refused("use temperature: 0 for the likeliest tokens", (True,), False),
    **_each(Refused("answers are sampled"), ("use_beam_search", "penalty_alpha", "early_stopping")),
    **_each(Refused("answers are sampled", (1,)), ("length_penalty", "num_beams")),
    **_each(
        Refused(_SAMPLER),
        ("mirostat", "mirostat_mode", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "smoothing_factor",
         "dynamic_temperature", "temperature_last", "penalize_nl"),
    ),
    **_each(Refused(_SAMPLER, (1,)), ("tfs", "tfs_z", "typical", "typical_p", "encoder_repetition_penalty")),
    **_each(
        Refused(_SAMPLER, (-1,)),
        ("dry_multiplier", "xtc_probability", "top_n_sigma", "nsigma", "top_a", "dynatemp_range"),
    ),
    **_each(
        NoEffect("only with a sampler that is refused"),
        ("mirostat_eta", "mirostat_tau", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
         "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "smoothing_curve"),
    ),
    # settings of the machine, and of the client itself
    **_each(
        NoEffect("settings of Ollama and llama.cpp; --max-context sets the context"),
        ("num_ctx", "num_batch", "num_keep", "num_gpu", "main_gpu", "num_thread", "low_vram", "use_mmap", "use_mlock",
         "numa", "keep_alive", "ttl", "n_keep", "cache_prompt", "id_slot"),
    ),
    **_each(NoEffect("requests are served in order of arrival"), ("priority",)),
    **_each(NoEffect("an id of the client's"), ("request_id", "rid", "trace_id", "client_metadata")),
    **_each(NoEffect("OpenRouter's choice of a server"), ("provider", "route")),
    "usage": NoEffect("answers have it; streams with stream_options.include_usage"),
    **_each(
        NoEffect("fields of Open WebUI, which handles them itself"),
        ("id", "chat_id", "session_id", "parent_id", "features", "background_tasks", "variables", "tool_ids",
         "tool_servers", "filter_ids", "model_item"),
    ),
}  # fmt: skip


def _without(rules: Rules, *names: str) -> Rules:
    """Return the rules for a body that declares the fields `names`."""
    return {name: rule for name, rule in rules.items() if name not in names}


CHAT: Rules = {
    **_without(ANSWERS, "mm_processor_kwargs"),
    "best_of": Refused("all n answers are returned", (1,)),
    "echo": _OUTPUT,
    "suffix": Refused("fill-in-the-middle is not supported"),
    "add_special_tokens": Refused("the chat template writes them all", (False,), False),
    **_each(Refused("use messages"), ("prompt", "input")),
    "instructions": Refused("use a message of role system"),
    "max_output_tokens": Refused("use max_completion_tokens"),
    "text": Refused("use response_format"),
}

COMPLETION: Rules = {
    **ANSWERS,
    **_each(Refused("/v1/chat/completions supports it"), ("messages", "tools", "chat_template_kwargs", "modalities",
                                                          "mm_processor_kwargs", "audio")),
    "tool_choice": Refused("/v1/chat/completions supports it", ("none", "auto")),
    "parallel_tool_calls": NoEffect("there are no tools"),
    **_each(
        Refused("a prompt is used as it is, without a chat template", is_harmless_when_empty=False),
        ("enable_thinking", "continue_final_message", "reasoning_effort", "add_generation_prompt", "thinking", "think"),
    ),
    **_each(Refused("use prompt"), ("input", "instructions", "system")),
    **_each(Refused("use max_tokens"), ("max_completion_tokens", "max_output_tokens")),
    **_each(Refused("use logprobs, which is a number here"), ("top_logprobs", "n_probs")),
}  # fmt: skip

RESPONSES: Rules = {
    **_without(ANSWERS, "reasoning", "user", "metadata", "store"),
    "background": Refused("responses are not computed in the background"),
    "conversation": Refused("conversations are not stored; use previous_response_id"),
    "prompt": Refused("prompts are not stored"),
    **_each(Refused("use /v1/chat/completions for log-probabilities"), ("logprobs", "top_logprobs", "n_probs")),
    "context_management": Refused("inputs are not truncated: send what the model should read"),
    "image": Refused("images are preprocessed as the checkpoint says"),
    "messages": Refused("use input"),
    "system": Refused("use instructions"),
    "n": Refused("a response has one answer", (1,)),
    "best_of": Refused("a response has one answer", (1,)),
    **_each(Refused("use max_output_tokens"), (*_LENGTHS, "max_tokens", "max_completion_tokens")),
    **_each(Refused("use text.format"), ("response_format", "format")),
    "reasoning_effort": Refused("use reasoning.effort"),
    "verbosity": Refused("the model has no such setting: ask for it in instructions", ("medium",)),
    **_each(Refused("/v1/chat/completions supports it"), ("modalities", "audio", "continue_final_message")),
}

_NO_MORE = Refused("use chunks as they come: usage is in the last one")
STREAM_OPTIONS: Rules = {
    "include_obfuscation": NoEffect("events have no padding"),
    **_each(_NO_MORE, ("continuous_usage_stats",)),
}
RESPONSE_FORMAT: Rules = _each(Refused("use type json_schema, with json_schema.schema"), ("schema", "value"))
JSON_SCHEMA: Rules = {"description": NoEffect("the schema alone binds the answer")}
RESPONSES_TEXT: Rules = {"verbosity": Refused("the model has no such setting: ask for it in instructions", ("medium",))}
RESPONSES_REASONING: Rules = {
    **_each(
        NoEffect("reasoning is returned in full", ("auto", "concise", "detailed")), ("summary", "generate_summary")
    ),
    "context": NoEffect("the chat template decides which reasoning it writes", ("auto", "current_turn", "all_turns")),
    "mode": Refused("there is one mode", ("standard",)),
}

# Refused fields of a message. All others go to the chat template: clients keep ids and notes in messages.
MESSAGE: Rules = {
    "function_call": Refused("use tool_calls"),
    "audio": Refused("this server stores no sounds"),
    **_each(Refused("use continue_final_message"), ("prefix", "partial")),
    "images": Refused("use parts of content, such as image_url"),
}
PART: Rules = {
    **_each(
        NoEffect("the prefix cache finds common beginnings by itself"), ("cache_control", "prompt_cache_breakpoint")
    ),
    **_each(NoEffect("notes of the client"), ("id", "uuid", "annotations", "logprobs")),
}
IMAGE_URL: Rules = {
    "detail": NoEffect("an image is read at the size that the checkpoint says", ("auto", "low", "high", "original")),
    "format": NoEffect("the format is read from the file"),
}

# Items in the input of /v1/responses.
ITEM: Rules = {
    **_each(NoEffect("set by earlier responses"), ("id", "status", "phase", "encrypted_content")),
    "caller": NoEffect("the function's caller"),
    "namespace": Refused("functions have no namespaces"),
}
TOOL: Rules = {
    "defer_loading": Refused("the model gets all tools"),
    "allowed_callers": NoEffect("the model calls functions"),
}
RESPONSES_FORMAT: Rules = {
    "description": NoEffect("the schema alone binds the answer"),
    "json_schema": Refused("use name, schema and strict beside type"),
}

_AS_IT_IS = "the model has no such setting: ask for it in the prompt"
IMAGES: Rules = {
    **_each(NoEffect("identifies the client's user"), ("user", "safety_identifier")),
    "moderation": NoEffect("images are not moderated", ("auto", "low")),
    "quality": Refused("set steps", ("auto", "standard", "medium")),
    "style": Refused(_AS_IT_IS, ("vivid",)),
    "complexity": Refused(_AS_IT_IS, ("medium",)),
    **_each(Refused("images are not animated: use /v1/videos"), ("frame_count", "frame_duration_ms")),
    "svg": Refused("images are made of pixels"),
    "markup": Refused("the whole image is edited"),
    "input_fidelity": Refused("the model sees the whole image", ("low",)),
    **_each(Refused("use size"), ("width", "height", "aspect_ratio", "resolution")),
    **_each(Refused("use n"), ("num_images", "num_images_per_prompt", "batch_size")),
    **_each(Refused("use guidance"), ("cfg_scale", "cfg", "true_cfg_scale")),
    **_each(Refused("the model's own is used"), ("sampler", "sampler_name", "scheduler", "flow_shift")),
    **_each(_FIXED, ("lora", "loras")),
    "strength": Refused("the model sees the whole image"),
}
VIDEOS: Rules = {
    **_without(IMAGES, "frame_duration_ms", "num_frames"),
    "n": Refused("a request makes one video", (1,)),
    "frame_count": Refused("use num_frames"),
    "duration": Refused("use seconds"),
}
SPEECH: Rules = {
    **SERVICE,
    **_each(Refused("the model detects the language of the text"), ("language", "lang_code")),
    **_each(Refused("the model's voices are its own"), ("ref_audio", "ref_text")),
    **_each(Refused("use stream_format"), ("stream_audio",)),
}
NO_TIMES = "the model returns text without times"
TRANSCRIPTION: Rules = {
    "timestamp_granularities": Refused(NO_TIMES),
    "include": Refused("log-probabilities are given by /v1/chat/completions"),
    **_each(Refused("speakers are not distinguished"), ("known_speaker_names", "known_speaker_references", "diarize")),
    **_each(Refused("use prompt"), ("keywords", "hotwords")),
    "languages": Refused("use language"),
    "chunking_strategy": Refused("a sound is transcribed as a whole", ("auto",)),
    **_each(NoEffect("identifies the client's user"), ("user",)),
}
