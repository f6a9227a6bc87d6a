"""Which replica gets a request."""

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.server.link.backend import EngineRequest
from tilewright.server.replicas.routing import (
    CHUNK_CHARACTERS,
    END_BYTES,
    HEADROOM,
    MAX_KEYS,
    MIN_CHARACTERS,
    PrefixRouter,
    prefix_keys,
)

SYSTEM = {"role": "system", "content": "You know all about tiles. " * 40}


def chat(*messages, **more):
    return EngineRequest(messages=[SYSTEM, *messages], **more)


def user(content):
    return {"role": "user", "content": content}


def image(data, text="What is on it?"):
    return user([{"type": "image", "image": data}, {"type": "text", "text": text}])


def common(first, second):
    """How many keys two requests begin with in common."""
    pairs = zip(prefix_keys(first), prefix_keys(second), strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min_length(first, second))


def min_length(first, second):
    return min(len(prefix_keys(first)), len(prefix_keys(second)))


def test_a_conversation_begins_with_its_earlier_turns():
    first = chat(user("What is a tile?" * 30))
    second = chat(
        user("What is a tile?" * 30), {"role": "assistant", "content": "Flat." * 60}, user("And a slab?" * 30)
    )
    assert common(first, second) == len(prefix_keys(first)) > 1
    assert len(prefix_keys(second)) > len(prefix_keys(first))


def test_short_beginnings_have_no_key():
    """All chats that begin with the same short sentence would go to one replica, for nothing."""
    short = EngineRequest(messages=[user("Hi")])
    assert prefix_keys(short) == ()
    assert len(prefix_keys(EngineRequest(text="a" * MIN_CHARACTERS))) == 1


def test_long_texts_differ_where_they_differ():
    text = "".join(random.Random(0).choices("abcdef ", k=10 * CHUNK_CHARACTERS))
    other = text[: 7 * CHUNK_CHARACTERS] + "?" + text[7 * CHUNK_CHARACTERS + 1 :]
    assert common(EngineRequest(text=text), EngineRequest(text=other)) == 7
    ids = list(range(3000))
    assert common(EngineRequest(token_ids=ids), EngineRequest(token_ids=[*ids[:2000], 7, *ids[2001:]])) > 2


def test_images_count_by_content():
    one, other = bytes(300_000), bytes(299_999) + b"x"
    assert common(EngineRequest(messages=[image(one)]), EngineRequest(messages=[image(one, "Why?")])) == 1
    assert common(EngineRequest(messages=[image(one)]), EngineRequest(messages=[image(other)])) == 0
    longer = bytes(2 * END_BYTES + 1)
    assert common(EngineRequest(messages=[image(longer)]), EngineRequest(messages=[image(longer + b"\0")])) == 0


def test_tools_and_template_arguments_come_first():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert common(chat(user("Hi")), chat(user("Hi"), tools=tools)) == 0
    assert common(chat(user("Hi")), chat(user("Hi"), template_arguments={"enable_thinking": False})) == 0


def test_the_number_of_keys_is_bounded():
    assert len(prefix_keys(EngineRequest(text="x" * CHUNK_CHARACTERS * (MAX_KEYS + 10)))) == MAX_KEYS


def test_the_replica_that_has_the_longest_beginning_comes_first():
    router = PrefixRouter()
    loads = {"a": 0, "b": 0, "c": 0}
    router.record([b"1", b"2"], "a")
    router.record([b"1", b"2", b"3"], "b")
    assert router.rank([b"1", b"2", b"3", b"4"], loads)[:2] == ["b", "a"]
    assert router.rank([b"1", b"x"], loads)[2] == "c"
    assert set(router.rank([b"1", b"x"], loads)[:2]) == {"a", "b"}


def test_much_busier_replicas_come_after_idle_ones():
    router = PrefixRouter()
    router.record([b"1"], "a")
    assert router.rank([b"1"], {"a": HEADROOM - 1, "b": 0})[0] == "a"
    assert router.rank([b"1"], {"a": HEADROOM, "b": 0})[0] == "b"
    assert router.rank([b"1"], {"a": 50 + HEADROOM - 1, "b": 50})[0] == "a"
    assert router.rank([b"1"], {"a": 100, "b": 50})[0] == "a", "1.5 times the mean is not much with so many"
    assert router.rank([b"1"], {"a": 200, "b": 50})[0] == "b"


def test_unknown_requests_go_to_the_least_busy():
    router = PrefixRouter()
    assert router.rank([b"new"], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert router.rank([], {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert router.rank([b"new"], {}) == []


def test_equal_replicas_are_chosen_by_the_beginning():
    """Requests spread, and those that begin alike go to the same one even before anything is remembered."""
    loads = dict.fromkeys("abcd", 0)
    firsts = [PrefixRouter().rank([bytes([number])], loads)[0] for number in range(200)]
    assert firsts == [PrefixRouter().rank([bytes([number])], dict(reversed(loads.items())))[0] for number in range(200)]
    counts = collections.Counter(firsts)
    assert set(counts) == set("abcd") and min(counts.values()) > 25


def test_replicas_to_avoid_come_last():
    router = PrefixRouter()
    router.record([b"1"], "a")
    assert router.rank([b"1"], {"a": 0, "b": 3}, avoid=["a"]) == ["b", "a"]


def test_a_lost_replica_is_forgotten():
    router = PrefixRouter()
    router.record([b"1"], "a")
    router.record([b"1", b"2"], "b")
    router.forget("b")
    assert router.rank([b"1", b"2"], {"a": 1, "b": 0}) == ["a", "b"]
    assert b"2" not in router._replicas_of


def test_what_was_sent_long_ago_is_forgotten():
    router = PrefixRouter(max_keys=2)
    router.record([b"1"], "a")
    router.record([b"2"], "b")
    router.record([b"1"], "a")
    router.record([b"3"], "b")
    assert set(router._replicas_of) == {b"1", b"3"}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=300))
def test_no_replica_gets_much_more_than_others(steps):
    """Whatever comes and ends: a request goes to a replica that is not over the limit."""
    router, loads = PrefixRouter(), collections.Counter({"a": 0, "b": 0, "c": 0})
    under_way = []
    for prompt, ends in steps:
        if ends and under_way:
            loads[under_way.pop()] -= 1
            continue
        keys = [bytes([prompt])]
        chosen = router.rank(keys, loads)[0]
        assert loads[chosen] < max(min(loads.values()) + HEADROOM, 1.5 * (sum(loads.values()) + 1) / 3)
        router.record(keys, chosen)
        loads[chosen] += 1
        under_way.append(chosen)


@pytest.mark.parametrize("value", [{"a": [1, {"b": None}]}, 3, None, "\ud800"])
def test_any_content_has_keys(value):
    request = EngineRequest(messages=[SYSTEM, {"role": "user", "content": [{"type": "text", "text": value}]}])
    assert len(prefix_keys(request)) >= 1
