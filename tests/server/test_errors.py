"""What errors say: the field that is wrong, what is wrong with it, and the code that clients look for."""

import httpx
import pytest

QUESTION = [{"role": "user", "content": "What is a tile?"}]
CHAT = {"messages": QUESTION, "max_tokens": 4}
COMPLETION = {"prompt": "A tile", "max_tokens": 4}
TOO_LONG = "long " * 9000
BAD_FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
BAD_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}},
}


@pytest.fixture(scope="module")
def http(chat_server):
    with httpx.Client(base_url=chat_server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("chat/completions", {"messages": [{"role": "tiler", "content": "x"}]}, "messages", "its role is 'tiler'"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages", "'file'"),
        ("chat/completions", {"messages": [{"role": "user", "content": [7]}]}, "messages", "messages.0.content.0"),
        ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
        ("chat/completions", {**CHAT, "stop": ["x"] * 40}, "stop", "at most 32 items"),
        ("chat/completions", {**CHAT, "stop": "x" * 2000}, "stop", "at most 1024 characters"),
        ("chat/completions", {**CHAT, "tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ("chat/completions", {**CHAT, "tools": [{"function": {"name": "a b"}}]}, "tools", "'a b'"),
        ("chat/completions", {**CHAT, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools", "the tool f"),
        ("chat/completions", {**CHAT, "structured_outputs": {"regex": "("}}, "structured_outputs", "expression"),
        ("chat/completions", {**CHAT, "structured_outputs": {}}, "structured_outputs", "expected one of"),
        ("chat/completions", {**CHAT, "guided_regex": "("}, "guided_regex", "the regular expression"),
        ("chat/completions", {**CHAT, "response_format": BAD_FORMAT}, "response_format", "the JSON schema"),
        ("chat/completions", {**CHAT, "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ("completions", {"prompt": []}, "prompt", "at least 1 item"),
        ("completions", {"prompt": ""}, "prompt", "the prompt has no tokens"),
        ("completions", {"prompt": [99999]}, "prompt", "99999"),
        ("completions", {"prompt": {"a": 1}}, "prompt", "prompt: Input should be"),
        ("responses", {"input": []}, "input", "input is empty"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/a"}]}]},
         "input", "image 1"),
        ("responses", {"input": "x", "metadata": {"a": "x" * 600}}, "metadata", "metadata has"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_errors_name_the_field(http, path, body, param, words):
    response = http.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("completions", {"prompt": TOO_LONG}, "prompt"),
        ("responses", {"input": TOO_LONG}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_that_clients_wait_for(http, path, body, param):
    for more in ({}, {"stream": True}):
        response = http.post(f"/v1/{path}", json={**body, **more})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


def test_a_body_that_is_not_json(http):
    for content, words in (
        (b'{"messages": [}', "the body is not JSON"),
        (b"", "the body is empty, expected a JSON object"),
        (b"[1]", "the body"),
        (b"7", "the body"),
    ):
        response = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] is None
        assert error["message"].startswith(words)


def test_a_body_of_another_type(http):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = http.post("/v1/chat/completions", content=b'{"messages": []}', headers={"Content-Type": kind})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"the content type is {kind!r}, expected application/json"
