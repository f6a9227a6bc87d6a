"""Fields that change an answer are supported or refused by name; none is ignored."""

import json
import re

import httpx
import pytest

from tilewright.server.fields import UNSUPPORTED

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


REFUSED = {
    "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "prediction": {"type": "content"}, "web_search_options": {"a": 1}, "chat_template": "{{ messages }}",
    "truncate_prompt_tokens": 5, "prompt_logprobs": 0,
    "bad_words": ["no"], "allowed_token_ids": [1], "grammar": "root ::= 'a'", "skip_special_tokens": False,
    "include_stop_str_in_output": True, "dry_multiplier": 0.8, "typical_p": 0.5, "cache_salt": "a",
    "documents": [{"text": "x"}], "use_beam_search": True, "max_new_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_served_is_refused_by_name(post, path, name):
    error = refusal_of(post(path, **{name: REFUSED[name]}))
    assert error["param"] == name and error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{name} is ") and UNSUPPORTED[name].reason in error["message"]


def test_what_a_chat_alone_does_not_serve(post):
    for name, value in {"best_of": 3, "echo": True, "add_special_tokens": True}.items():
        assert refusal_of(post("/v1/chat/completions", **{name: value}))["param"] == name
    assert refusal_of(post("/v1/completions", suffix="x"))["param"] == "suffix"
    assert refusal_of(post("/v1/completions", audio={"voice": "ann"}))["param"] == "audio"  # chats are spoken


@pytest.mark.parametrize(
    "field", [{"function_call": {"name": "f", "arguments": "{}"}}, {"audio": {"id": "a"}}, {"prefix": True}], ids=str
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
        "function_call": None, "functions": [], "skip_special_tokens": True, "repeat_penalty": 1.2, "mirostat": 2,
        "use_beam_search": False, "bad_words": [], "top_n_sigma": -1, "verbosity": "medium", "priority": 3,
        "made_up": 1,
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
    assert error["param"] == "tools" and "no form for tool calls" in error["message"]
    call = {"id": "1", "type": "function", "function": {"name": "lay_tile", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    error = refusal_of(httpx.post(path, json={"messages": [*QUESTION, said]}))
    assert error["param"] == "messages" and "no form for tool_calls" in error["message"]
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
    assert backend.requests[0].template_args == {"continue_final_message": True, "add_generation_prompt": False}
    assert backend.requests[1].template_args == {"add_generation_prompt": False, "enable_thinking": False}
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal_of(post("/v1/chat/completions", **both))["param"] == "add_generation_prompt"
    assert refusal_of(post("/v1/chat/completions", continue_final_message=True))["param"] == "continue_final_message"
    messages = [*QUESTION, {"role": "assistant", "content": "A tile is"}]
    continued = post("/v1/chat/completions", messages=messages, continue_final_message=True)
    turn = post("/v1/chat/completions", messages=messages)
    assert continued.json()["usage"]["prompt_tokens"] < turn.json()["usage"]["prompt_tokens"]
