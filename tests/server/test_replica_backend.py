"""Requests whose replica is lost: computed again, each token passed on once. No Ray: replicas that follow a script."""

import asyncio
import contextlib
import json
import urllib.request

import openai
import pytest
from conftest import serving

from tilewright.server.link.backend import (
    AnswerDelta,
    DecodedLogprob,
    Ended,
    EngineRequest,
    Failed,
    ModelInfo,
    Restarted,
    Started,
)
from tilewright.server.replicas import backend as replica_backend
from tilewright.server.replicas.backend import MAX_LOST, Recovery, ReplicaBackend, ReplicaLost, with_seed
from tilewright.server.replicas.routing import combined
from tilewright.types import EngineUnavailable, RequestError, Timings

ENDED = Ended(3, 0, 4, Timings(0.0, 0.1, 0.2))
LOST = object()  # in a script: the replica is lost here
NOT_READY = object()  # it has no engine yet
HANGS = object()  # and here it computes on


def delta(text, num_tokens=1, index=0, finish=None, logprobs=None):
    return AnswerDelta(index, text, num_tokens, finish, logprobs)


def answer(*texts):
    return [Started(3, False), *(delta(text) for text in texts), delta("", 1, finish="stop"), ENDED]


def passed_on(*attempts):
    """What a listener sees of several attempts."""
    seen = []
    recovery = Recovery(seen.append)
    for events in attempts:
        recovery.begin()
        for event in events:
            recovery.add(event)
    return seen


def text_of(events, index=0):
    return "".join(event.text for event in events if isinstance(event, AnswerDelta) and event.index == index)


def num_tokens_of(events):
    return sum(event.num_tokens for event in events if isinstance(event, AnswerDelta))


def test_one_attempt_is_passed_on_as_it_is():
    assert passed_on(answer("He", "llo")) == answer("He", "llo")


@pytest.mark.parametrize("num_seen", range(1, 6))
@pytest.mark.parametrize(
    "second", [("He", "llo", " you"), ("Hello", " you"), ("H", "e", "l", "lo y", "ou"), ("Hello you",)]
)
def test_a_second_attempt_continues_where_the_first_was_lost(num_seen, second):
    """However the steps of both divide the text, as those with drafts do."""
    first = answer("Hel", "lo", " you")
    seen = passed_on(first[:num_seen], answer(*second))
    assert text_of(seen) == "Hello you"
    assert [type(event) for event in seen].count(Started) == [type(event) for event in seen].count(Ended) == 1
    assert [event.finish_reason for event in seen if isinstance(event, AnswerDelta)].count("stop") == 1
    assert num_tokens_of(seen) == max(len(second) + 1, num_tokens_of(first[:num_seen]))
    assert not [event for event in seen if isinstance(event, Restarted)]


def test_logprobs_are_passed_on_once():
    probs = [DecodedLogprob(letter.encode(), -1.0, ()) for letter in "abcd"]
    first = [Started(3, False), delta("ab", 2, logprobs=tuple(probs[:2]))]
    second = [Started(3, False), delta("abc", 3, logprobs=tuple(probs[:3])), delta("d", 1, 0, "stop", tuple(probs[3:]))]
    seen = passed_on(first, [*second, ENDED])
    assert [item for event in seen if isinstance(event, AnswerDelta) for item in event.logprobs] == probs


def test_another_answer_starts_over():
    first = answer("Hello", " you")[:3]
    second = answer("Hello", " we", " are")
    seen = passed_on(first, second)
    assert seen == [*first, Restarted(), *second]


def test_a_shorter_answer_starts_over():
    seen = passed_on(answer("Hello", " you")[:3], answer("Hello"))
    assert seen[3:] == [Restarted(), *answer("Hello")]


def test_of_several_answers_none_is_lost_when_one_differs():
    first = [Started(3, False), delta("a", index=0), delta("x", index=1)]
    second = [
        Started(3, False),
        delta("a", index=0),
        delta("b", index=0),
        delta("y", index=1),
        delta("z", index=1),
        ENDED,
    ]
    seen = passed_on(first, second)
    after = seen[seen.index(Restarted()) + 1 :]
    assert text_of(after, 0) == "ab" and text_of(after, 1) == "yz" and after[0] == Started(3, False)


def test_every_request_has_a_seed():
    given = EngineRequest(text="x", sampling={"seed": 7, "temperature": 1.0})
    assert with_seed(given) is given
    first, second = with_seed(EngineRequest(text="x")), with_seed(EngineRequest(text="x"))
    assert first.sampling["seed"] != second.sampling["seed"]


class ScriptedReplicas:
    """Replicas that answer the k-th time they are asked as the k-th script says."""

    def __init__(self, *scripts, running=("a", "b")):
        self.scripts = list(scripts)
        self.running = list(running)
        self.asked = []  # (request, route) of each attempt
        self.num_closed = 0
        self.num_replaced = 0

    async def start(self):
        return ModelInfo("scripted", 4096, 8, None)

    async def answer(self, request, route):
        self.asked.append((request, route))
        name = next((name for name in self.running if name not in route.avoid), self.running[0])
        try:
            for event in self.scripts[min(len(self.asked), len(self.scripts)) - 1]:
                await asyncio.sleep(0)
                if event is LOST:
                    raise ReplicaLost(f"{name} died")
                if event is HANGS:
                    await asyncio.sleep(3600)
                if isinstance(event, Exception):
                    raise event
                yield name, [] if event is NOT_READY else [event]
        finally:
            self.num_closed += 1

    async def stats(self, replica):
        return {
            "num_replicas": 1,
            "num_running": 1,
            "prefix_hit_rate": 0.5,
            "step_age_s": 1.0 if replica == "a" else 900.0,
        }

    async def replace_all(self):
        self.num_replaced += 1

    async def close(self):
        self.running = []


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(replica_backend, "PAUSE_S", 0.01)


def events_of(replicas, request=None):
    """All events of a request to a ReplicaBackend."""

    async def live():
        backend = ReplicaBackend(replicas)
        await backend.start()
        seen, ended = [], asyncio.Event()

        def listen(event):
            seen.append(event)
            if isinstance(event, Ended | Failed):
                ended.set()

        backend.submit(request or EngineRequest(text="x"), listen)
        await asyncio.wait_for(ended.wait(), 10)
        await backend.close()
        return seen, backend

    return asyncio.run(live())


def test_a_lost_request_is_computed_again():
    replicas = ScriptedReplicas([*answer("Hello", " you")[:2], LOST], answer("Hello", " you"))
    seen, backend = events_of(replicas)
    assert text_of(seen) == "Hello you" and seen[-1] == ENDED
    (first, _), (second, _) = replicas.asked
    assert first == second and first.sampling["seed"] is not None, "the same tokens are drawn again"
    assert replicas.num_closed == 2 and backend.num_restarts == 1


def test_a_replica_without_an_engine_is_avoided():
    replicas = ScriptedReplicas([NOT_READY], answer("Hello"))
    seen, _ = events_of(replicas)
    assert text_of(seen) == "Hello"
    assert [route.avoid for _, route in replicas.asked] == [(), ("a",)]


def test_a_request_waits_for_an_engine():
    replicas = ScriptedReplicas(*[[NOT_READY]] * 9, answer("Hello"))
    seen, _ = events_of(replicas)
    assert text_of(seen) == "Hello" and len(replicas.asked) == 10


def test_an_engine_that_ends_is_as_a_lost_replica():
    ended = Failed("unavailable", "the engine ended (signal SIGKILL) and is being restarted; send the request again")
    seen, backend = events_of(ScriptedReplicas([*answer("Hello")[:2], ended], answer("Hello")))
    assert seen == answer("Hello") and backend.num_restarts == 1


def test_a_request_that_ends_every_replica_is_given_up():
    replicas = ScriptedReplicas([Started(3, False), LOST])
    seen, _ = events_of(replicas)
    assert len(replicas.asked) == MAX_LOST
    assert seen[-1].kind == "unavailable" and "died" in seen[-1].message and len(seen) == 2


def test_a_stream_that_ends_without_an_answer_is_computed_again():
    seen, _ = events_of(ScriptedReplicas(answer("Hello")[:2], answer("Hello")))
    assert text_of(seen) == "Hello" and seen[-1] == ENDED


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Failed("request", "max_tokens is 0"), "request"),
        (Failed("engine", "a bug"), "engine"),
        (ValueError("a bug in the replica"), "engine"),
        (RequestError("nested too deeply"), "request"),
    ],
)
def test_errors_of_the_request_are_not_repeated(error, kind):
    replicas = ScriptedReplicas([error])
    seen, _ = events_of(replicas)
    assert [event.kind for event in seen] == [kind] and len(replicas.asked) == 1


def test_an_aborted_request_is_closed():
    replicas = ScriptedReplicas([Started(3, False), HANGS])

    async def live():
        backend = ReplicaBackend(replicas)
        with pytest.raises(EngineUnavailable, match="loading"):
            _ = backend.model
        with pytest.raises(EngineUnavailable, match="starting"):
            backend.submit(EngineRequest(text="x"), print)
        await backend.start()
        seen = asyncio.Queue()
        abort = backend.submit(EngineRequest(text="x"), seen.put_nowait)
        assert await seen.get() == Started(3, False)
        abort()
        abort()
        while not replicas.num_closed:
            await asyncio.sleep(0.001)
        assert seen.empty()
        backend.replace_all()
        await asyncio.sleep(0.01)
        assert replicas.num_replaced == 1
        await backend.close()

    asyncio.run(asyncio.wait_for(live(), 10))


def test_a_request_nested_too_deeply_is_refused():
    deep = {}
    for _ in range(100_000):
        deep = {"in": deep}

    async def live():
        backend = ReplicaBackend(ScriptedReplicas(answer("Hello")))
        await backend.start()
        with pytest.raises(RequestError, match="nested too deeply"):
            backend.submit(EngineRequest(text="x", template_arguments=deep), print)

    asyncio.run(live())


def test_stats_are_those_of_all_replicas():
    replicas = ScriptedReplicas(answer("Hello"))

    async def live():
        backend = ReplicaBackend(replicas)
        await backend.start()
        assert backend.model.max_sequences == 16
        stats = await backend.stats()
        assert stats == {"num_replicas": 2, "num_running": 2, "prefix_hit_rate": 0.5, "step_age_s": 1.0}
        replicas.running = []
        with pytest.raises(EngineUnavailable, match="no replica is running"):
            await backend.stats()

    asyncio.run(live())
    assert combined([{"a": 1, "b": None}, {"a": 2}]) == {"a": 3}


@pytest.fixture
def scripted_server():
    """Makes servers in front of ScriptedReplicas."""
    with contextlib.ExitStack() as stack:

        def make(*scripts):
            backend = ReplicaBackend(ScriptedReplicas(*scripts))
            backend._model = ModelInfo("scripted", 4096, 8, None)
            return stack.enter_context(serving(lambda: backend))

        yield make


QUESTION = {"model": "", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_lost_stream_goes_on_where_it_was(scripted_server):
    running = scripted_server([*answer("Hello", " you")[:2], LOST], answer("He", "llo", " you"))
    stream = running.client().chat.completions.create(stream=True, **QUESTION)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "Hello you"


def test_a_lost_stream_that_cannot_go_on_ends_with_an_error(scripted_server):
    running = scripted_server([*answer("Hello", " you")[:2], LOST], answer("Good day"))
    stream = running.client().chat.completions.create(stream=True, **QUESTION)
    seen = []
    with pytest.raises(openai.APIError, match="another one answers differently"):
        seen += [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    running = scripted_server([*answer("Hello", " you")[:2], LOST], answer("Good day"))
    events = list(running.client().responses.create(model="", input="Hi", stream=True))
    assert events[-1].type == "response.failed"


def test_an_answer_that_is_not_streamed_is_always_computed_again(scripted_server):
    """Also where the second one differs: nothing of the first was sent."""
    lost = [*answer("Hello", " you")[:3], LOST]
    client = scripted_server(lost, answer("Good", " day")).client()
    found = client.chat.completions.create(**QUESTION)
    assert found.choices[0].message.content == "Good day" and found.choices[0].finish_reason == "stop"
    client = scripted_server(lost, answer("Good", " day")).client()
    assert client.responses.create(model="", input="Hi").output_text == "Good day"
    client = scripted_server(answer("One"), lost, answer("Two")).client()
    both = client.completions.create(model="", prompt=["x", "y"])
    assert {choice.text for choice in both.choices} == {"One", "Two"}


def test_health_and_metrics_say_how_many_replicas_there_are(scripted_server):
    running = scripted_server(answer("Hello"))
    with urllib.request.urlopen(f"{running.url}/health", timeout=30) as response:
        assert json.load(response) == {"status": "ok", "replicas": 2}
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=30) as response:
        assert "tilewright_replicas 2.0" in response.read().decode()
