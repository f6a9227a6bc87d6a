"""`tilewright.Engine` as people use it, on a tiny checkpoint that sees."""

import gc
import io
import os
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
import tiny_checkpoint
from PIL import Image

import tilewright
from tilewright.types import RequestError


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_checkpoint.write_vision_model(tmp_path_factory.mktemp("vision"))
    with tilewright.Engine(folder, dtype="float32", kv_memory="20MB", max_context=512, pack_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8))


def about(picture, text="What is it?"):
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]


def say(text):
    return [{"role": "user", "content": text}]


def test_a_picture_by_any_way_in_is_the_same_picture(engine, picture, tmp_path):
    picture.save(tmp_path / "picture.png")
    encoded = io.BytesIO()
    picture.save(encoded, "png")
    ways = [picture, tmp_path / "picture.png", str(tmp_path / "picture.png"), encoded.getvalue(), np.asarray(picture)]
    answers = [engine.chat(about(way), max_tokens=8).token_ids for way in ways]
    assert len(set(answers)) == 1
    other = Image.fromarray(255 - np.asarray(picture))
    assert engine.chat(about(other), max_tokens=8).token_ids != answers[0]


def test_a_second_turn_finds_the_first_in_the_cache(engine, picture):
    question = about(picture, "Tell me all about it. " * 4)
    first = engine.chat(question, max_tokens=8)
    again = engine.chat(question, max_tokens=8)
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens >= 64
    assert engine.stats().feature_hit_rate > 0


def test_features_that_were_dropped_after_a_request_was_prepared_are_made_again(engine, picture, monkeypatch):
    """The engine reads the picture before the step that needs it: no preparing thread has decoded it."""
    first = engine.chat(about(picture, "Dropped?"), max_tokens=8)
    resources = engine.loop.core.resources
    resources.media.features.clear()
    resources.kv.prefix_cache.pool.clear()
    monkeypatch.setattr(resources.media, "is_known", lambda key: True)
    loaded = []
    load = engine.loaded.processor.media_buffer.load
    monkeypatch.setattr(engine.loaded.processor.media_buffer, "load", lambda region: loaded.append(load(region)))
    assert engine.chat(about(picture, "Dropped?"), max_tokens=8).token_ids == first.token_ids
    assert len(loaded) == 1


def test_the_memory_of_pictures_is_free_when_their_requests_are_done(engine, picture):
    handles = [engine.submit_chat(about(picture, str(number)), max_tokens=3) for number in range(5)]
    for handle in handles:
        handle.result()
    with pytest.raises(RequestError, match="cannot be decoded"):
        engine.chat(about(picture_cut_short()), max_tokens=1)
    engine.chat(say("the last step has been let go of"), max_tokens=2)
    gc.collect()
    buffer = engine.loaded.processor.media_buffer
    assert buffer.num_free_rows == buffer.num_rows


def picture_cut_short() -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (40, 56, 3), dtype=np.uint8)).save(encoded, "png")
    return encoded.getvalue()[:3000]


def test_sound_is_refused(engine):
    with pytest.raises(RequestError, match="audio 1: the model accepts text and image and video"):
        engine.generate("hum", audios=[b"x"], max_tokens=1)


def test_lists_and_n(engine):
    one, two = engine.chat([say("one"), say("two")], max_tokens=5)
    assert one.token_ids == engine.chat(say("one"), max_tokens=5).token_ids
    assert two.token_ids == engine.chat(say("two"), max_tokens=5).token_ids
    several = engine.chat(say("one"), max_tokens=5, n=3, temperature=1.0, seed=1)
    assert len(several) == 3 and len({answer.token_ids for answer in several}) > 1
    texts = engine.generate(["a", "bb"], max_tokens=4)
    ids = engine.generate(prompt_token_ids=[engine.loaded.tokenizer.encode(text) for text in ("a", "bb")], max_tokens=4)
    assert [answer.token_ids for answer in texts] == [answer.token_ids for answer in ids]


def test_generate_with_pictures(engine, picture):
    text = "<|vision_start|><|image_pad|><|vision_end|>?"
    alone = engine.generate(text, images=[picture], max_tokens=6)
    first, second = engine.generate([text, "no picture"], images=[[picture], []], max_tokens=6)
    assert first.token_ids == alone.token_ids
    assert second.token_ids == engine.generate("no picture", max_tokens=6).token_ids


def test_a_stream_is_the_answer_in_pieces(engine):
    whole = engine.chat(say("stream"), max_tokens=12)
    deltas = list(engine.stream(say("stream"), max_tokens=12))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason == "length"
    assert len(deltas) > 3


def test_leaving_a_stream_frees_its_place(engine):
    for _ in engine.stream(prompt="go on", max_tokens=400, ignore_eos=True):
        break
    assert engine.chat(say("next"), max_tokens=2).finish_reason == "length"
    assert engine.stats().num_running == 0


def test_log_probabilities(engine):
    answer = engine.generate("abc", max_tokens=3, logprobs=4, prompt_logprobs=2)
    assert [item.token_id for item in answer.logprobs] == list(answer.token_ids)
    for item in answer.logprobs:
        assert item.rank == 1 and len(item.top) == 4 and item.top[0] == (item.token_id, item.logprob)
    assert answer.prompt_logprobs[0] is None
    prompt = engine.loaded.tokenizer.encode("abc")
    assert [item.token_id for item in answer.prompt_logprobs[1:]] == prompt[1:]


def test_stops(engine):
    whole = engine.generate("where to stop", max_tokens=30, ignore_eos=True, stop_token_ids=[])
    place = whole.token_ids[10]
    cut = engine.generate("where to stop", max_tokens=30, ignore_eos=True, stop_token_ids=[place])
    assert cut.finish_reason == "stop" and cut.token_ids == whole.token_ids[: whole.token_ids.index(place) + 1]


def test_timings_and_counts(engine):
    answer = engine.generate("time", max_tokens=4)
    timings = answer.timings
    assert 0 <= timings.queued_s <= timings.first_token_s <= timings.total_s
    assert answer.num_prompt_tokens == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"surprise": 1}, "unknown sampling parameter 'surprise'$"),
        ({"temperatur": 1}, "unknown sampling parameter 'temperatur'; did you mean temperature?"),
        ({"logit_bias": {100000: 1.0}}, "token 100000"),
    ],
)
def test_bad_parameters_are_named(engine, options, words):
    with pytest.raises(RequestError, match=words):
        engine.generate("x", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperatur": 0.0}, "unknown option 'temperatur', .*; did you mean temperature?"),
        ({"template_argument": {}}, "did you mean template_arguments?"),
        ({"template_arguments": {"temperature": 0.0}}, "template_arguments has 'temperature'"),
    ],
)
def test_a_misspelt_option_of_a_chat_is_refused(engine, options, words):
    """It was once taken for an argument of the chat template, which did not read it."""
    with pytest.raises(RequestError, match=words):
        engine.chat([{"role": "user", "content": "x"}], max_tokens=1, **options)


def test_arguments_of_the_chat_template(engine):
    """By the mapping, or by names that the template reads; one that no template needs to know may always be given."""
    ask = partial(engine.submit_chat, [{"role": "user", "content": "x"}], max_tokens=1)
    handles = ask(), ask(enable_thinking=False), ask(template_arguments={"enable_thinking": False, "other": 1})
    assert len({handle.result()[0].num_prompt_tokens for handle in handles[1:]}) == 1


@pytest.mark.parametrize("prompt", [{"prompt": ""}, {"prompt_token_ids": []}, {"prompt_token_ids": [[1], []]}])
def test_a_prompt_without_tokens_is_refused(engine, prompt):
    with pytest.raises(RequestError, match="no tokens, expected at least 1"):
        engine.generate(**prompt, max_tokens=2)
    assert engine.generate([], max_tokens=2) == []  # no prompts, no answers


def test_token_ids_may_be_an_array(engine):
    ids = engine.loaded.tokenizer.encode("abc")
    expected = engine.generate(prompt_token_ids=ids, max_tokens=4).token_ids
    assert engine.generate(prompt_token_ids=np.array(ids), max_tokens=4).token_ids == expected
    (answer,) = engine.generate(prompt_token_ids=np.array([ids]), max_tokens=4)
    assert answer.token_ids == expected


def test_bad_requests_hurt_no_others(engine, picture):
    expected = engine.chat(say("good"), max_tokens=6).token_ids
    failures = []

    def bad(messages):
        try:
            engine.chat(messages, max_tokens=6)
        except RequestError as error:
            failures.append(str(error))

    threads = [
        threading.Thread(target=bad, args=(messages,))
        for messages in (about(b"no picture at all"), say("x" * 2000), about("missing.png"))
    ]
    for thread in threads:
        thread.start()
    assert engine.chat(say("good"), max_tokens=6).token_ids == expected
    for thread in threads:
        thread.join()
    assert len(failures) == 3
    assert any("image 1" in failure for failure in failures)


PLACES = """
import os, sys, tilewright
everywhere = os.sched_getaffinity(0)
with tilewright.Engine(sys.argv[1], kv_memory="5MB", max_context=128, pack_cache=False) as engine:
    engine.generate("x", max_tokens=2)
    stepping = os.sched_getaffinity(engine.loop._thread.native_id)
    preparing = engine.loop._preparers.submit("text", lambda: os.sched_getaffinity(0)).result()
assert stepping == {min(everywhere)}, stepping
assert preparing == everywhere, preparing
"""


def test_pinning_reaches_the_thread_that_computes(tmp_path):
    """The engine's thread, with a team of its own, is pinned as TILEWRIGHT_BIND says; those that prepare are free."""
    folder = tiny_checkpoint.write_text_model(tmp_path)
    environment = {**os.environ, "TILEWRIGHT_BIND": str(min(os.sched_getaffinity(0)))}
    subprocess.run([sys.executable, "-c", PLACES, folder], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"device": "cuda"}, "device is 'cuda'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"kv_memory": "lots"}, "'lots'"),
    ],
)
def test_options_that_cannot_be(engine, tmp_path_factory, options, words):
    folder = tiny_checkpoint.write_text_model(tmp_path_factory.mktemp("text"))
    with pytest.raises(RequestError, match=words):
        tilewright.Engine(folder, pack_cache=False, **options)
