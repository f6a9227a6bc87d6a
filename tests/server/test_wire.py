"""Requests and events come out as they went in, on their way between the server and the engine."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from test_frames import texts, through

from tilewright.server.link.backend import (
    AnswerDelta,
    DecodedLogprob,
    Ended,
    EngineRequest,
    Failed,
    Started,
    event_from_json,
    event_to_json,
    request_from_json,
    request_to_json,
)
from tilewright.types import Constraint, Timings

decoded = st.builds(
    DecodedLogprob,
    st.binary(max_size=8),
    st.none() | st.floats(allow_nan=False),
    st.lists(st.tuples(st.binary(max_size=8), st.floats(allow_nan=False)), max_size=3).map(tuple),
)
events = st.one_of(
    st.builds(Started, st.integers(0), st.booleans()),
    st.builds(
        AnswerDelta,
        st.integers(0, 9),
        texts,
        st.integers(0),
        st.sampled_from([None, "stop", "length"]),
        st.none() | st.lists(decoded, max_size=3).map(tuple),
    ),
    st.builds(
        Ended,
        st.integers(0),
        st.integers(0),
        st.integers(0),
        st.builds(Timings, st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.none() | st.floats(0, 1e12)),
        st.none() | texts,
        st.none() | st.lists(decoded, max_size=3).map(tuple),
        st.none() | st.floats(0, 2),
    ),
    st.builds(Failed, st.sampled_from(["request", "engine", "unavailable"]), texts),
)


@given(st.lists(events, max_size=5))
def test_events(sent):
    message = through({"events": [["id", event_to_json(event)] for event in sent]})
    assert [event_from_json(fields) for _, fields in message["events"]] == sent


def test_samples_of_an_event():
    event = AnswerDelta(1, "", 0, "stop", audio=b"\x00\xff\x80" * 100)
    message = through({"events": [["id", event_to_json(event)]]})
    assert event_from_json(message["events"][0][1]) == event


def test_requests():
    sampling = {"max_tokens": 3, "logit_bias": {5: 1.5}, "constraint": Constraint("regex", "a+", True)}
    messages = [{"role": "user", "content": [{"type": "image", "image": b"\x00\xff"}, {"type": "text", "text": "?"}]}]
    request = EngineRequest(
        messages=messages,
        template_arguments={"enable_thinking": False},
        continue_final_message=True,
        sampling=sampling,
        returns_prompt=True,
    )
    assert request_from_json(through({"request": request_to_json(request)})["request"]) == request
    bare = EngineRequest(token_ids=[1, 2])
    assert dataclasses.asdict(
        request_from_json(through({"request": request_to_json(bare)})["request"])
    ) == dataclasses.asdict(bare)
