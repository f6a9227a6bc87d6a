"""Messages between the two processes come out as they went in."""

import dataclasses
import io

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
    frame = io.BytesIO(b"".join(wire.encode(message)))
    (text_bytes,) = wire.HEAD.unpack(frame.read(wire.HEAD.size))
    envelope = wire.decode(frame.read(text_bytes))
    blobs = [frame.read(size) for size in envelope.sizes]
    assert not frame.read()
    return envelope.fill(blobs)


@given(st.dictionaries(texts, values, max_size=4))
def test_messages(message):
    assert through(message) == message


@given(st.lists(events, max_size=5))
def test_events(sent):
    message = through({"events": [["id", wire.event_to_json(event)] for event in sent]})
    assert [wire.event_from_json(fields) for _, fields in message["events"]] == sent


def test_samples_of_an_event():
    event = AnswerDelta(1, "", 0, "stop", audio=b"\x00\xff\x80" * 100)
    message = through({"events": [["id", wire.event_to_json(event)]]})
    assert wire.event_from_json(message["events"][0][1]) == event


def test_blobs_are_written_as_they_are():
    """Raw behind the JSON, and not a copy of them: a video has tens of megabytes."""
    picture, sound = b"\x00\xff" * 500, b"RIFF"
    head, *blobs = wire.encode({"messages": [{"image": picture}, {"audio": sound}]})
    assert blobs[0] is picture and blobs[1] is sound
    assert picture not in head and len(head) < 200


def test_requests():
    sampling = {"max_tokens": 3, "logit_bias": {5: 1.5}, "constraint": Constraint("regex", "a+", True)}
    messages = [{"role": "user", "content": [{"type": "image", "image": b"\x00\xff"}, {"type": "text", "text": "?"}]}]
    request = EngineRequest(
        messages=messages, template_args={"enable_thinking": False}, sampling=sampling, wants_prompt=True
    )
    assert wire.request_from_json(through({"request": wire.request_to_json(request)})["request"]) == request
    bare = EngineRequest(token_ids=[1, 2])
    assert dataclasses.asdict(
        wire.request_from_json(through({"request": wire.request_to_json(bare)})["request"])
    ) == dataclasses.asdict(bare)
