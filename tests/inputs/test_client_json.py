"""JSON of clients: the values that Python's parser gives, within limits that are ours and are said."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.engine.constraint.compiler import grammar_of
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.client_json import MAX_DEPTH, MAX_DIGITS, parse_json
from tilewright.types import Constraint, RequestError

texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too
leaves = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | texts
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


@given(values, st.booleans())
def test_the_same_values_as_python(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert repr(parse_json(body, "it")) == repr(json.loads(body))  # NaN, and 1 apart from 1.0 and True


@pytest.mark.parametrize(
    "body", [b"1e999", b"-0", '"utf-16"'.encode("utf-16"), b"\xef\xbb\xbf1",
             b'"\\ud800"', b"1" * 5000 + b".5", b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, b"1" * MAX_DIGITS],
)  # fmt: skip
def test_what_is_accepted_as_python_does(body):
    assert repr(parse_json(body, "it")) == repr(json.loads(body))


DEEP = f"lists and objects in more than {MAX_DEPTH} levels, the limit"
LONG = f"an integer of 5000 digits, the limit is {MAX_DIGITS}"
FAULTS = [
    ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), DEEP),
    ("[" * 100_000 + "]" * 100_000, DEEP),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, DEEP),
    ("1" * 5000, LONG),
    ('{"a": -' + "1" * 5000 + "}", LONG),
]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *FAULTS,
        ('["\\ud800", ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "]", DEEP),  # by Python's parser
        ('{"a": [{"b": 1, "c": 2, "b": 1}]}', "the key 'b' twice in an object"),
        ('{"a": 1, "\\u0061": 2}', "the key 'a' twice in an object"),
        ('{"\\ud800": 1, "\\ud800": 2}', "twice in an object"),
        ("{", "is not JSON: Expecting property name enclosed in double quotes at character 1"),
        ("[1,]", "is not JSON: "),
        ("[1] 2", "is not JSON: Extra data at character 4"),
        ("", "is not JSON: Expecting value at character 0"),
        ('{"a": 01}', "is not JSON: "),
    ],
)
def test_what_is_refused(body, words):
    for text in (body, body.encode()):
        with pytest.raises(RequestError, match=r"^the body ") as caught:
            parse_json(text, "the body")
        assert words in str(caught.value) and "Exceeds" not in str(caught.value)


def test_bytes_that_are_no_text():
    with pytest.raises(RequestError, match="the body is not JSON: 'utf-8' codec can't decode byte 0xff"):
        parse_json(b'"\xff"', "the body")


@pytest.mark.parametrize(("text", "words"), [*FAULTS, ("[" * 100_000, DEEP)])
def test_the_same_limits_within_a_request(text, words):
    """A schema as text, and the arguments of a call that comes back with the conversation."""
    with pytest.raises(
        RequestError, match=f"the JSON schema has {words}" if "]" in text or "}" in text else "the JSON"
    ):
        grammar_of(Constraint("json_schema", text))
    call = {"function": {"name": "f", "arguments": text}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    with pytest.raises(RequestError, match=f"the text of a tool call's arguments has {words}"):
        template.render([{"role": "assistant", "tool_calls": [call]}])


def test_a_key_that_a_model_wrote_twice_ends_no_conversation():
    call = {"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    assert template.render([{"role": "assistant", "tool_calls": [call]}]) == '{"a": 2}'
