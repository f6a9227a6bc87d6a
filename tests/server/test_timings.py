"""The timings of an answer are sent with it: the engine counts, the last chunk carries it, others read on."""

import pytest
from conftest import serving

from tilewright.engine.engine import Engine
from tilewright.engine.measure.stats import StepReads
from tilewright.server.api.chat import timings
from tilewright.server.link.backend import Ended
from tilewright.server.link.remote import LocalBackend
from tilewright.types import Timings

READ_LIMIT = 20e9
QUESTION = [{"role": "user", "content": "How fast?"}]


@pytest.fixture(scope="module")
def engine(chat_folder):
    # Without drafts a step gives one token: the counts of steps and tokens are equal.
    with Engine(chat_folder, pack_cache=False, kv_memory="64MB", speculate=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    with serving(lambda: LocalBackend(engine, (READ_LIMIT, 1e12))) as running:
        yield running.client()


def test_what_the_steps_after_the_first_token_read(engine, monkeypatch):
    counter, steps = engine.loop._counter, []
    count = counter.count
    monkeypatch.setattr(counter, "count", lambda step: (steps.append(step), count(step)))
    found = engine.chat(QUESTION, max_tokens=9, ignore_eos=True).timings.decode_bytes_per_s
    assert len(steps) == 9 and all(step.read_bytes > 0 for step in steps)
    later = steps[1:]
    assert found == pytest.approx(sum(step.read_bytes for step in later) / sum(step.took_s for step in later))


def test_an_answer_of_one_token_has_no_speed(engine, client):
    assert engine.chat(QUESTION, max_tokens=1).timings.decode_bytes_per_s is None
    answer = client.chat.completions.create(model="", messages=QUESTION, max_tokens=1)
    assert answer.timings.keys() == {"queued_s", "time_to_first_token_s", "total_s"}


def test_reads():
    assert StepReads(10, 2.0).speed_since(StepReads(4, 0.5)) == 4.0
    assert StepReads(10, 2.0).speed_since(StepReads(10, 2.0)) is None  # no step since
    assert StepReads(0, 2.0).speed_since(StepReads(0, 0.5)) is None  # nobody counts bytes


def test_whole_answers_tell_it(client):
    answer = client.chat.completions.create(model="", messages=QUESTION, max_tokens=20)
    timings = answer.timings
    num_later_tokens = answer.usage.completion_tokens - 1
    assert 0 <= timings["queued_s"] <= timings["time_to_first_token_s"] <= timings["total_s"]
    decode_s = timings["total_s"] - timings["time_to_first_token_s"]
    assert timings["tokens_per_s"] == pytest.approx(num_later_tokens / decode_s)
    assert timings["bandwidth_share"] > 0


def test_streams_tell_it_with_the_usage_alone(client):
    options = {"model": "", "messages": QUESTION, "max_tokens": 5, "stream": True}
    chunks = list(client.chat.completions.create(**options, stream_options={"include_usage": True}))
    assert [hasattr(chunk, "timings") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].timings["tokens_per_s"] > 0
    assert not any(hasattr(chunk, "timings") for chunk in client.chat.completions.create(**options))


def test_the_share_is_of_the_measured_limit(engine, client, monkeypatch):
    """Of the read speed, not of the operations beside it."""
    speeds, completion = [], engine.loop._completion

    def kept(sequence):
        found = completion(sequence)
        speeds.append(found.timings.decode_bytes_per_s)
        return found

    monkeypatch.setattr(engine.loop, "_completion", kept)
    answer = client.chat.completions.create(model="", messages=QUESTION, max_tokens=6, extra_body={"ignore_eos": True})
    assert answer.timings["bandwidth_share"] * READ_LIMIT == pytest.approx(speeds[0])


def test_timings_fields():
    ended = Ended(3, 0, 11, Timings(0.1, 0.5, 2.5, READ_LIMIT / 4), bandwidth_share=0.25)
    assert timings(ended) == {
        "queued_s": 0.1,
        "time_to_first_token_s": 0.5,
        "total_s": 2.5,
        "tokens_per_s": 5.0,
        "bandwidth_share": 0.25,
    }


def test_several_answers_start_before_their_first_token(client):
    for _ in range(5):
        answer = client.chat.completions.create(model="", messages=QUESTION, max_tokens=4, n=4)
        assert answer.timings["queued_s"] <= answer.timings["time_to_first_token_s"] <= answer.timings["total_s"]


def test_without_a_measured_limit_there_is_no_share(chat_server):
    answer = chat_server.client().chat.completions.create(model="", messages=QUESTION, max_tokens=4)
    assert "bandwidth_share" not in answer.timings and answer.timings["tokens_per_s"] > 0
