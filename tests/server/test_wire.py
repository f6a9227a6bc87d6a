"""Messages between the two processes come out as they went in."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from tilewright.server.link import wire
from tilewright.server.link.backend import AnswerDelta, Ended, EngineRequest, Failed, SpelledLogprob, Started
from tilewright.types import Constraint, Timings

texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too: JSON from clients may have them
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=50)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)
spelled = st.builds(
    SpelledLogprob,
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
        st.none() | st.lists(spelled, max_size=3).map(tuple),
    ),
    st.builds(
        Ended,
        st.integers(0),
        st.integers(0),
        st.integers(0),
        st.builds(Timings, st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.none() | st.floats(0, 1e12)),
        st.none() | texts,
        st.none() | st.lists(spelled, max_size=3).map(tuple),
        st.none() | st.floats(0, 2),
    ),
    st.builds(Failed, st.sampled_from(["request", "engine", "unavailable"]), texts),
)


def through(message):
    frame = wire.encode(message)
    body_bytes, text_bytes = wire.HEAD.unpack(frame[: wire.HEAD.size])
    body = frame[wire.HEAD.size :]
    assert len(body) == body_bytes
    return wire.decode(body, text_bytes)


@given(st.dictionaries(texts, values, max_size=4))
def test_messages(message):
    assert through(message) == message


@given(st.lists(events, max_size=5))
def test_events(sent):
    message = through({"events": [["id", wire.event_to_json(event)] for event in sent]})
    assert [wire.event_from_json(fields) for _, fields in message["events"]] == sent


def test_asks():
    sampling = {"max_tokens": 3, "logit_bias": {5: 1.5}, "constraint": Constraint("regex", "a+", True)}
    messages = [{"role": "user", "content": [{"type": "image", "image": b"\x00\xff"}, {"type": "text", "text": "?"}]}]
    ask = EngineRequest(
        messages=messages, template_args={"enable_thinking": False}, sampling=sampling, wants_prompt=True
    )
    assert wire.request_from_json(through({"request": wire.request_to_json(ask)})["request"]) == ask
    bare = EngineRequest(token_ids=[1, 2])
    assert dataclasses.asdict(
        wire.request_from_json(through({"request": wire.request_to_json(bare)})["request"])
    ) == dataclasses.asdict(bare)
