"""Qwen3.5 behind the server, as users start it: reasoning, images, video, turns, and clients that leave."""

import base64
import json
import time
import urllib.request

import openai
import pytest
from chat_parts import image, text, user
from clips import write_clip
from serve_process import ServerProcess
from tiny_checkpoint import FIRST_SPECIAL, QWEN_SPECIAL, QWEN_TAGS, SPECIAL, write_hybrid_model

from tilewright import Engine

THINK_END = FIRST_SPECIAL + len(QWEN_SPECIAL + SPECIAL[1:]) + QWEN_TAGS.index("</think>")
LONG = "The whale swims through the sea, and nobody knows where to. " * 4
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hybrid_model(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def server(folder):
    process = ServerProcess(folder, "--dtype", "float32", "--kv-memory", "8MB", "--max-context", "1024")
    yield process
    process.end()


@pytest.fixture
def client(server):
    return server.client()


def complete(client, *messages, max_tokens=12, extra=None, **options):
    body = {"ignore_eos": True, **(extra or {})}
    options = {"temperature": 0, **options}
    return client.chat.completions.create(
        model="", messages=list(messages), max_tokens=max_tokens, extra_body=body, **options
    )


def reasoning_of(message):
    return getattr(message, "reasoning_content", None) or ""


def metrics(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def wait_until_idle(server):
    deadline = time.monotonic() + 30
    while (now := metrics(server))["tilewright_state_slots_used"] or now["tilewright_requests_running"]:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)


def test_reasoning_is_returned_separately(client):
    """Reasoning is on by default, and no part of the answer."""
    message = complete(client, user(text("Why?"))).choices[0].message
    assert reasoning_of(message) and not message.content
    for off in (QUIET, {"reasoning_effort": "none"}):
        message = complete(client, user(text("Why?")), extra=off).choices[0].message
        assert message.content and not reasoning_of(message)
    drawn = [
        complete(client, user(text("Why?")), max_tokens=30, temperature=1.0, seed=seed, logit_bias={str(THINK_END): 6})
        for seed in range(8)
    ]
    parted = [(reasoning_of(one.choices[0].message), one.choices[0].message.content) for one in drawn]
    assert any(reasoning and answer for reasoning, answer in parted)
    assert not any("</think>" in reasoning for reasoning, _ in parted)


@pytest.mark.parametrize("extra", [{}, QUIET], ids=["thinking", "quiet"])
def test_a_stream_is_the_answer_in_pieces(client, extra):
    question = user(image(40, 56, 1), text("What is it?"))
    whole = complete(client, question, max_tokens=40, extra=extra).choices[0].message
    pieces = [chunk.choices[0].delta for chunk in complete(client, question, max_tokens=40, extra=extra, stream=True)]
    assert "".join(piece.content or "" for piece in pieces) == (whole.content or "")
    assert "".join(reasoning_of(piece) for piece in pieces) == reasoning_of(whole)


def test_images_and_a_video_are_seen(client, tmp_path):
    clip = base64.b64encode(write_clip(tmp_path / "clip.mp4", 30)).decode()
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{clip}"}}
    parts = [[], [image(40, 56, 1)], [image(40, 56, 2)], [video]]
    answers = [complete(client, user(*media, text("What?")), extra=QUIET) for media in parts]
    assert len({answer.choices[0].message.content for answer in answers}) == len(parts)
    assert answers[0].usage.prompt_tokens < answers[1].usage.prompt_tokens < answers[3].usage.prompt_tokens


def test_the_second_turn_is_found_and_is_the_same(folder, server, client):
    turns = [user(text(LONG), image(40, 56, 1), text("What?"))]
    first = complete(client, *turns, max_tokens=30, extra=QUIET)
    turns += [{"role": "assistant", "content": first.choices[0].message.content}, user(text("And why?"))]
    second = complete(client, *turns, max_tokens=30, extra=QUIET)
    assert second.usage.prompt_tokens_details.cached_tokens >= 192
    options = {"dtype": "float32", "kv_memory": "8MB", "max_context": 1024, "prefix_cache": False, "speculate": 0}
    with Engine(folder, pack_cache=False, **options) as plain:
        alone = plain.chat(turns, max_tokens=30, temperature=0, ignore_eos=True, enable_thinking=False)
    assert alone.num_cached_tokens == 0
    assert alone.text == second.choices[0].message.content
    assert metrics(server)["tilewright_state_cache_hit_ratio"] > 0


def test_several_answers_at_once(client):
    drawn = {"max_tokens": 20, "temperature": 1.0, "seed": 5, "extra": QUIET}
    answers = [choice.message.content for choice in complete(client, user(text(LONG)), n=3, **drawn).choices]
    assert len(set(answers)) == 3
    again = [choice.message.content for choice in complete(client, user(text(LONG)), n=3, **drawn).choices]
    assert again == answers


def test_constrained_answers(client):
    schema = {"type": "object", "properties": {"whale": {"const": "a very large animal"}}, "required": ["whale"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    answer = complete(client, user(text("What?")), max_tokens=80, extra=QUIET, response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"whale": "a very large animal"}


def test_log_probabilities_of_a_prompt(client):
    given = client.completions.create(model="", prompt=LONG, max_tokens=2, echo=True, logprobs=1, temperature=0)
    logprobs = given.choices[0].logprobs.token_logprobs
    assert logprobs[0] is None and len(logprobs) >= len(LONG) and all(one < 0 for one in logprobs[1:])


def test_a_client_that_leaves_holds_nothing(server, client):
    for count in (0, 1, 9):
        stream = complete(client, user(text(LONG + str(count))), max_tokens=600, extra=QUIET, stream=True)
        for _ in range(count):
            next(stream)
        stream.close()
    wait_until_idle(server)
    assert complete(client, user(text("Still there?")), extra=QUIET).choices[0].message.content


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "system", "content": [image(40, 56, 1), text("x")]}, "System message cannot contain images"),
        (user(text("x" * 2000)), "context length is 1024 tokens"),
    ],
)
def test_what_is_refused(client, message, words):
    with pytest.raises(openai.BadRequestError, match=words):
        complete(client, message, user(text("x")))


def test_a_placeholder_in_the_text_of_a_message_is_text(client):
    placeholder, word = (complete(client, user(text(f"see {it}"))).usage.prompt_tokens for it in ("<|image_pad|>", "x"))
    assert placeholder > word  # its letters, not one token that an image would have to stand for
