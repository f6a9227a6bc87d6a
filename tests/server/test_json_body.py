"""Large bodies are read by another parser, with the same outcome."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.server import json_body

texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too
leaves = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | texts
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


@pytest.fixture(autouse=True)
def every_body_is_large(monkeypatch):
    monkeypatch.setattr(json_body, "LARGE_BODY_BYTES", 0)


@given(values, st.booleans())
def test_the_same_values(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    parsed, expected = json_body.parse_json(body), json.loads(body)
    assert repr(parsed) == repr(expected)  # NaN, and 1 apart from 1.0 and True


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1,]", b"{'a': 1}", b"\xff\xfe", b"", b"[1] 2", b'{"a": 01}', b'"\n"', b'{"a":1,"a":2}', b"1e999",
     b"-0", b"[" * 300 + b"]" * 300, '"utf-16"'.encode("utf-16"), b"\xef\xbb\xbf1", b'"\\ud800"'],
)  # fmt: skip
def test_the_same_outcome(body):
    def outcome(parse):
        try:
            return repr(parse(body))
        except ValueError as error:
            return type(error), str(error)

    assert outcome(json_body.parse_json) == outcome(json.loads)
