"""Prompts that are too long are refused at once, at every endpoint, and delay no other request."""

import json
import re
import threading

import openai
import pytest
from chat_parts import image
from test_guard import error_of, send, wait_until

from tilewright.inputs.messages import MAX_MESSAGES
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import ContextLengthExceeded, RequestError

LONG = "a " * 2_000_000
# The words of OpenAI's server, by which litellm, LangChain and others know that a history is to be shortened.
WORDS = (
    r"This model's maximum context length is \d+ tokens\. However, your .*\. Please reduce the length of the prompt\."
)


@pytest.fixture
def untokenized(monkeypatch):
    """Fails where a text of more than a piece is tokenized."""
    original = Tokenizer._ids

    def ids(self, text, add_special_tokens):
        assert len(text) < 100_000, "it was tokenized"
        return original(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_ids", ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": LONG}}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG]}),
        ("/v1/completions", {"prompt": [1] * 100_000}),
        ("/v1/completions", {"prompt": [[1], [1] * 100_000]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": "x", "instructions": LONG}),
    ],
)
def test_refused_by_every_interface(chat_server, untokenized, path, body):
    status, _, text = send(chat_server.url + path, body)
    error = error_of(text)
    assert (status, error["code"]) == (400, "context_length_exceeded"), error
    assert re.match(WORDS, error["message"])


def test_a_prompt_that_is_a_little_too_long_has_the_same_code_and_words(chat_server):
    status, _, text = send(f"{chat_server.url}/v1/completions", {"prompt": "a" * 9000})
    assert status == 400 and error_of(text)["code"] == "context_length_exceeded"
    assert re.match(WORDS, error_of(text)["message"])


def test_so_has_one_whose_images_are_too_long(vision_server, vision_engine):
    """The text alone fits, and its images alone do."""
    num_tokens = vision_engine.text_limits.max_context - 200
    words = "a" * num_tokens
    assert len(vision_engine.loaded.tokenizer.encode(words)) <= num_tokens
    content = [*(image(64, 64, seed) for seed in range(8)), {"type": "text", "text": words}]
    body = {"messages": [{"role": "user", "content": content}]}
    status, _, text = send(f"{vision_server.url}/v1/chat/completions", body)
    assert (status, error_of(text)["code"]) == (400, "context_length_exceeded"), text
    assert re.match(WORDS, error_of(text)["message"])


def test_many_messages(chat_server):
    messages = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    status, _, text = send(f"{chat_server.url}/v1/chat/completions", {"messages": messages})
    assert status == 400 and error_of(text)["code"] == "array_above_max_length"


def test_refused_by_the_engine(chat_engine, untokenized):
    for ask in (
        lambda: chat_engine.chat([{"role": "user", "content": LONG}]),
        lambda: chat_engine.generate(LONG),
        lambda: chat_engine.generate(["x", LONG], max_tokens=1),
        lambda: chat_engine.generate(prompt_token_ids=[1] * 100_000),
        lambda: list(chat_engine.stream(prompt=LONG)),
    ):
        with pytest.raises(ContextLengthExceeded, match=WORDS):
            ask()


def test_a_long_prompt_keeps_no_short_one_waiting(chat_engine, chat_server, monkeypatch):
    """While it is tokenized, other requests run; it ends when its client leaves."""
    began, may_go_on, pieces = threading.Event(), threading.Event(), []
    original = Tokenizer._ids

    def ids(self, text, add_special_tokens):
        if len(text) > 60_000:
            pieces.append(len(text))
            began.set()
            may_go_on.wait(30)
            return [1]
        return original(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_ids", ids)
    monkeypatch.setattr(chat_engine, "text_limits", type(chat_engine.text_limits)(8192, 1000))
    client = chat_server.client()
    leaving = chat_server.client(timeout=3)

    def ask_and_leave():
        with pytest.raises(openai.APITimeoutError):
            _ask(leaving, "b " * 300_000)

    left = threading.Thread(target=ask_and_leave)
    left.start()
    assert began.wait(30)
    assert _ask(client, "short").choices
    left.join(30)
    wait_until(lambda: chat_server.handler.served.text_models[0].admission.num_answers == 0)
    may_go_on.set()
    wait_until(lambda: chat_engine.stats().num_preparing == 0)
    assert len(pieces) == 1


def _ask(client, text):
    return client.completions.create(model="", prompt=text, max_tokens=1)


def test_the_code_survives_the_way_from_the_engine():
    from tilewright.server.http.errors import as_api_error
    from tilewright.server.link.backend import EngineRequest, event_from_json, event_to_json
    from tilewright.server.link.service import failure

    def api_error(error):
        event = event_to_json(failure(error, EngineRequest(text="", names={"prompt": "input"})))
        return as_api_error(event_from_json(json.loads(json.dumps(event))).error())

    too_long = api_error(ContextLengthExceeded(100, "your prompt is long"))
    assert (too_long.code, too_long.param) == ("context_length_exceeded", "input")
    assert api_error(RequestError("x")).code is None
