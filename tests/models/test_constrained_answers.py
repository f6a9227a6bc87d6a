"""Constrained answers of `tilewright.Engine`: whatever else is set, the same tokens, and a document that fits."""

import json
import re

import jsonschema_rs
import pytest
import tiny_checkpoint

import tilewright
from tilewright.types import Constraint, RequestError

SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["book", "film"]},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 1900, "maximum": 2099}, "maxItems": 2},
    },
    "required": ["title", "kind", "years"],
    "additionalProperties": False,
}
DOCUMENT = Constraint("json_schema", json.dumps(SCHEMA))
DATE = Constraint("regex", r"\d{4}-\d{2}-\d{2}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.write_text_model(tmp_path_factory.mktemp("text"))


def open_engine(folder, **options):
    return tilewright.Engine(folder, dtype="float32", kv_memory="20MB", max_context=512, pack_cache=False, **options)


def say(text):
    return [{"role": "user", "content": text}]


def ask(engine):
    """Constrained and free answers, together and one by one, greedy and drawn."""
    together = [
        engine.submit_chat(say("a book"), constraint=DOCUMENT, max_tokens=300),
        engine.submit_chat(say("anything"), max_tokens=20, ignore_eos=True),
        engine.submit_chat(say("a film"), constraint=DOCUMENT, max_tokens=300, temperature=1.0, seed=3, n=2),
        engine.submit_prompt(text="a day: ", constraint=DATE, temperature=0.7, seed=4, logprobs=1),
    ]
    found = [completion for handle in together for completion in handle.result(60)]
    for index, completion in enumerate(found):
        if index != 1:
            assert completion.finish_reason == "stop"
    for index in (0, 2, 3):
        assert jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(found[index].text))
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", found[4].text)
    return [completion.token_ids for completion in found]


def test_the_same_answers_whatever_is_set(folder):
    with open_engine(folder) as engine:
        expected = ask(engine)
        # The forced text of a document takes few steps: 300 tokens and more would be of one answer alone.
        assert engine.chat(say("a book"), constraint=DOCUMENT, max_tokens=300).token_ids == expected[0]
        assert engine.chat(say("anything"), max_tokens=20, ignore_eos=True).token_ids == expected[1]
        assert engine.generate("a day: ", constraint=DATE, temperature=0.7, seed=4).token_ids == expected[4]
        deltas = list(engine.stream(say("a book"), constraint=DOCUMENT, max_tokens=300))
        assert sum((delta.token_ids for delta in deltas), ()) == expected[0]
        assert json.loads("".join(delta.text for delta in deltas))
    for options in ({"speculate": 0, "replay": False}, {"max_sequences": 1}, {"prefix_cache": False, "speculate": 8}):
        with open_engine(folder, **options) as engine:
            assert ask(engine) == expected, options


def test_a_bad_constraint_is_the_users_mistake(folder):
    with open_engine(folder) as engine:
        with pytest.raises(RequestError, match=r"(?s)the regular expression cannot be used: .*unclosed group"):
            engine.generate("x", constraint=Constraint("regex", "(a"))
        with pytest.raises(RequestError, match="unclosed group"):
            list(engine.stream(say("x"), constraint=Constraint("regex", "(a")))
        assert engine.generate("x", constraint=Constraint("regex", "(a|b)c")).text in ("ac", "bc")
        assert engine.stats().num_running == 0
