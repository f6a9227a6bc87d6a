"""Fields that change an answer are supported or refused by name; none is ignored.

`PYTHONPATH=tests python tests/server/test_fields.py` writes the tables of docs/fields.md.
"""

import json
import re
import typing

import httpx
import pytest
from openai.types import (
    completion_create_params,
    image_edit_params,
    image_generate_params,
    video_create_params,
)
from openai.types.audio import speech_create_params, transcription_create_params, translation_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from sources import ROOT

from tilewright.server.api import fields
from tilewright.server.api.endpoints import ENDPOINTS, FILE_ENDPOINTS
from tilewright.server.api.images.request import EditBody, ImageBody, VideoBody

QUESTION = [{"role": "user", "content": "What is a tile?"}]
TOOL = {"type": "function", "function": {"name": "lay_tile", "parameters": {"type": "object", "properties": {}}}}
BODIES = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 4},
    "/v1/completions": {"prompt": "What is a tile?", "max_tokens": 4},
    "/v1/responses": {"input": "What is a tile?", "max_output_tokens": 4},
}


@pytest.fixture(scope="module")
def post(chat_server):
    with httpx.Client(base_url=chat_server.url, timeout=60) as client:
        yield lambda path, **more: client.post(path, json={**BODIES[path], **more})


def answer_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def refusal_of(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


BODY_OF = {
    **{path: endpoint.body for path, endpoint in {**ENDPOINTS, **FILE_ENDPOINTS}.items()},
    "/v1/images/generations": ImageBody,
    "/v1/images/edits": EditBody,
    "/v1/videos": VideoBody,
}
OF_OPENAI = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsStreaming,
    "/v1/audio/speech": speech_create_params.SpeechCreateParams,
    "/v1/audio/transcriptions": transcription_create_params.TranscriptionCreateParamsStreaming,
    "/v1/audio/translations": translation_create_params.TranslationCreateParams,
    "/v1/images/generations": image_generate_params.ImageGenerateParamsStreaming,
    "/v1/images/edits": image_edit_params.ImageEditParamsStreaming,
    "/v1/videos": video_create_params.VideoCreateParams,
}
PAGE = ROOT / "docs" / "fields.md"


def declared(body):
    """The names that a request may use for the fields of a body."""
    hidden = {"data"} if "data" in body.model_fields else set()  # the file of a form, which is `file` there
    return {*body.declared()} - hidden | ({"file"} if hidden else set())


def tables():
    """The tables of docs/fields.md."""

    def table(rules):
        lines = [f"| {names} | {treatment} |" for names, treatment in fields.rows(rules)]
        return "\n".join(["| field | what happens |", "| --- | --- |", *lines])

    sections = [f"## All requests for text\n\n{table(fields.ANSWERS)}"]
    for path, body in BODY_OF.items():
        own = {name: rule for name, rule in body.others.items() if fields.ANSWERS.get(name) != rule}
        supported = ", ".join(f"`{name}`" for name in sorted(declared(body)))
        sections.append(f"## `{path}`\n\nSupported: {supported}.\n\n{table(own if own else body.others)}")
    nested = {
        "`stream_options`": fields.STREAM_OPTIONS,
        "`response_format`": fields.RESPONSE_FORMAT,
        "`response_format.json_schema`": fields.JSON_SCHEMA,
        "`text` of a response": fields.RESPONSES_TEXT,
        "`text.format` of a response": fields.RESPONSES_FORMAT,
        "`reasoning` of a response": fields.RESPONSES_REASONING,
        "`tools` of a response": fields.TOOL,
        "Items of a response's `input`": fields.ITEM,
        "Messages": fields.MESSAGE,
        "Parts of messages": fields.PART,
        "`image_url` of a part": fields.IMAGE_URL,
    }
    sections += [f"### {name}\n\n{table(rules)}" for name, rules in nested.items()]
    sections.insert(1 + len(BODY_OF), "## Objects within")
    return "\n\n".join(sections) + "\n"


def test_the_page_has_the_tables():
    assert PAGE.read_text().endswith(tables()), "PYTHONPATH=tests python tests/server/test_fields.py writes them"


@pytest.mark.parametrize("path", OF_OPENAI)
def test_every_field_of_openai_is_supported_or_in_the_table(path):
    names = set(typing.get_type_hints(OF_OPENAI[path]))
    assert len(names) > 4
    assert names <= declared(BODY_OF[path]) | set(BODY_OF[path].others)


@pytest.mark.parametrize("path", BODY_OF)
def test_no_field_is_both_supported_and_in_the_table(path):
    assert not set(BODY_OF[path].others) & declared(BODY_OF[path])


REFUSED = {
    "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "prediction": {"type": "content"}, "web_search_options": {"a": 1}, "chat_template": "{{ messages }}",
    "truncate_prompt_tokens": 5, "prompt_logprobs": 0,
    "bad_words": ["no"], "allowed_token_ids": [1], "grammar": "root ::= 'a'", "skip_special_tokens": False,
    "include_stop_str_in_output": True, "dry_multiplier": 0.8, "typical_p": 0.5, "cache_salt": "a",
    "documents": [{"text": "x"}], "use_beam_search": True, "max_new_tokens": 5,
    "stop_sequences": ["a"], "num_predict": 5, "max_length": 5, "system": "Be brief.", "thinking": {"type": "enabled"},
    "format": "json", "options": {"num_predict": 5}, "samplers": ["top_k"], "tfs_z": 0.5, "n_probs": 5,
    "lora": [{"id": 0}], "repeat_penalty": 1.1, "mirostat": 2, "think": False, "images": ["AAAA"],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_served_is_refused_by_name(post, path, name):
    error = refusal_of(post(path, **{name: REFUSED[name]}))
    assert error["param"] == name and error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{name} is ")
    assert BODY_OF[path].others[name].reason in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_what_nobody_knows_is_refused(post, path):
    error = refusal_of(post(path, made_up=1))
    assert error["param"] == "made_up" and error["code"] == "unknown_parameter" and "made_up is 1" in error["message"]
    assert "did you mean temperature?" in refusal_of(post(path, temprature=1))["message"]


WRONG_VALUES = [
    ("/v1/chat/completions", {"reasoning_effort": "lots"}, "reasoning_effort", "'xhigh'"),
    ("/v1/chat/completions", {"service_tier": "best"}, "service_tier", "expected auto, default, flex"),
    ("/v1/chat/completions", {"stream_options": {"made_up": 1}}, "stream_options", "stream_options.made_up is 1"),
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
     "response_format", "use type json_schema"),
    ("/v1/chat/completions", {"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs",
     "structured_outputs.json_object is True"),
    ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f", "made_up": 1}}},
     "tool_choice", "tool_choice.function.made_up is 1"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs",
     "'enable_thinkin', which the chat template"),
    ("/v1/chat/completions", {"max_output_tokens": 5}, "max_output_tokens", "use max_completion_tokens"),
    ("/v1/completions", {"tools": [TOOL]}, "tools", "/v1/chat/completions supports it"),
    ("/v1/completions", {"enable_thinking": False}, "enable_thinking", "without a chat template"),
    ("/v1/responses", {"text": {"verbosity": "low"}}, "text", "text.verbosity is 'low'"),
    ("/v1/responses", {"truncation": "bogus"}, "truncation", "'auto' or 'disabled'"),
    ("/v1/responses", {"max_tool_calls": -4}, "max_tool_calls", "greater than or equal to 1"),
    ("/v1/responses", {"include": ["zz"]}, "include", "'reasoning.encrypted_content'"),
    ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management", "not truncated"),
    ("/v1/responses", {"conversation": "c"}, "conversation", "use previous_response_id"),
    ("/v1/responses", {"prompt": {"id": "p"}}, "prompt", "prompts are not stored"),
    ("/v1/responses", {"top_logprobs": 3}, "top_logprobs", "use /v1/chat/completions"),
    ("/v1/responses", {"reasoning": {"effort": "lots"}}, "reasoning", "'xhigh'"),
    ("/v1/responses", {"reasoning": {"summary": "long"}}, "reasoning", "expected auto, concise, detailed"),
    ("/v1/responses", {"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ("/v1/responses", {"response_format": {"type": "text"}}, "response_format", "use text.format"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x", "made_up": 1}]}, "input", "input[0].made_up is 1"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}}, "text",
     "use name, schema and strict"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "param", "words"), WRONG_VALUES, ids=lambda value: str(value)[:40])
def test_values_and_objects_within_are_checked_too(post, path, more, param, words):
    error = refusal_of(post(path, **more))
    assert error["param"] == param and words in error["message"], error


def test_parts_are_checked_too(post):
    for part, words in (
        ({"type": "text", "text": "x", "made_up": 1}, "messages[0].content[0].made_up is 1"),
        (
            {"type": "image_url", "image_url": {"url": "data:,", "detail": "best"}},
            "image_url.detail is 'best', expected",
        ),
        ({"type": "image_url", "image_url": {"url": "data:,", "crop": 1}}, "image_url.crop is 1"),
    ):
        error = refusal_of(post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}]))
        assert error["param"] == "messages" and words in error["message"]


def test_what_clients_note_in_messages_is_for_the_template(scripted):
    """CodeCompanion, for one, sends ids with its messages."""
    running, backend = scripted()
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "id": 7, "opts": {"visible": False}}
    assert httpx.post(f"{running.url}/v1/chat/completions", json={"messages": [message]}).status_code == 200
    assert backend.requests[0].messages[0]["opts"] == {"visible": False}


def test_what_a_chat_alone_does_not_serve(post):
    for name, value in {"best_of": 3, "echo": True, "add_special_tokens": True}.items():
        assert refusal_of(post("/v1/chat/completions", **{name: value}))["param"] == name
    assert refusal_of(post("/v1/completions", suffix="x"))["param"] == "suffix"
    assert refusal_of(post("/v1/completions", audio={"voice": "ann"}))["param"] == "audio"  # chats are spoken


@pytest.mark.parametrize(
    "field",
    [{"function_call": {"name": "f", "arguments": "{}"}}, {"audio": {"id": "a"}}, {"prefix": True}, {"images": ["AA"]}],
    ids=str,
)
def test_what_is_not_served_of_a_message(post, field):
    error = refusal_of(
        post("/v1/chat/completions", messages=[*QUESTION, {"role": "assistant", "content": "A", **field}])
    )
    (name,) = field
    assert f"messages[1].{name}" in error["message"] and error["param"] == "messages"


@pytest.mark.parametrize("path", BODIES)
def test_what_means_nothing_is_taken(post, path):
    """Values that change nothing, and fields about other things than the answer."""
    more = {
        "user": "ada", "store": False, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "k",
        "function_call": None, "functions": [], "skip_special_tokens": True, "repeat_penalty": 1, "mirostat": 0,
        "use_beam_search": False, "bad_words": [], "top_n_sigma": -1, "verbosity": "medium", "priority": 3,
        "num_ctx": 4096, "metadata": {"a": "b"}, "prompt_cache_retention": "24h", "stream_options": None,
        "made_up": None,
    }  # fmt: skip
    assert post(path, **more).status_code == 200


CLOSED = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
GUIDED = {
    "guided_json": (CLOSED, r'\{ ?"a" ?: ?1 ?\}'),
    "guided_regex": ("ti(le|n)s", "ti(le|n)s"),
    "guided_choice": (["red", "blue"], "red|blue"),
    "guided_grammar": ('start: "a" | "b"', "a|b"),
}  # fmt: skip


@pytest.mark.parametrize("name", GUIDED)
def test_guided_answers_are_those_of_structured_outputs(post, name):
    given, allowed = GUIDED[name]
    off = {"enable_thinking": False, "max_tokens": 60}
    for value in [given, json.dumps(given)] if name == "guided_json" else [given]:
        content = answer_of(post("/v1/chat/completions", **{name: value}, **off))["message"]["content"]
        assert re.fullmatch(allowed, content)
        assert re.fullmatch(allowed, answer_of(post("/v1/completions", **{name: value}, max_tokens=60))["text"])
    error = refusal_of(post("/v1/chat/completions", **{name: given}, response_format={"type": "json_object"}))
    assert error["param"] == name and f"response_format and {name} constrain the answer" in error["message"]


def test_a_response_format_binds_a_completion(post):
    schema = {"schema": {"enum": ["tile"]}}
    response_format = {"type": "json_schema", "json_schema": schema}
    assert answer_of(post("/v1/completions", response_format=response_format, max_tokens=60))["text"] == '"tile"'


def test_tools_that_the_model_would_not_see(scripted, chat_engine):
    running, backend = scripted(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    path = f"{running.url}/v1/chat/completions"
    error = refusal_of(httpx.post(path, json={"messages": QUESTION, "tools": [TOOL]}))
    assert error["param"] == "tools" and "no syntax for tool calls" in error["message"]
    call = {"id": "1", "type": "function", "function": {"name": "lay_tile", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    error = refusal_of(httpx.post(path, json={"messages": [*QUESTION, said]}))
    assert error["param"] == "messages" and "no syntax for tool calls" in error["message"]
    assert httpx.post(path, json={"messages": QUESTION, "tools": [TOOL], "tool_choice": "none"}).status_code == 200
    assert len(backend.requests) == 1


def test_a_refusal_is_what_was_said(scripted):
    running, backend = scripted()
    said = {"role": "assistant", "content": None, "refusal": "I will not."}
    httpx.post(f"{running.url}/v1/chat/completions", json={"messages": [*QUESTION, said, *QUESTION]})
    assert backend.requests[0].messages[1]["content"] == "I will not."


def test_continue_final_message(post, scripted):
    running, backend = scripted()
    path = f"{running.url}/v1/chat/completions"
    httpx.post(path, json={"messages": QUESTION, "continue_final_message": True, "add_generation_prompt": False})
    httpx.post(path, json={"messages": QUESTION, "add_generation_prompt": False, "enable_thinking": False})
    continued, closed = backend.requests
    assert continued.continue_final_message and not continued.add_generation_prompt
    assert not closed.continue_final_message and not closed.add_generation_prompt
    assert (continued.template_arguments, closed.template_arguments) == ({}, {"enable_thinking": False})
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal_of(post("/v1/chat/completions", **both))["param"] == "add_generation_prompt"
    assert refusal_of(post("/v1/chat/completions", continue_final_message=True))["param"] == "continue_final_message"
    messages = [*QUESTION, {"role": "assistant", "content": "A tile is"}]
    continued = post("/v1/chat/completions", messages=messages, continue_final_message=True)
    turn = post("/v1/chat/completions", messages=messages)
    assert continued.json()["usage"]["prompt_tokens"] < turn.json()["usage"]["prompt_tokens"]


if __name__ == "__main__":
    kept = PAGE.read_text().partition("## All requests for text")[0]
    PAGE.write_text(kept + tables())
