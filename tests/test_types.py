"""What SamplingParams takes and makes of it: a field that a step stumbles over is refused when it is made."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.types import MAX_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS, Constraint, RequestError, SamplingParams

INTEGERS = {"max_tokens": 7, "min_tokens": 3, "top_k": 5, "seed": 5, "n": 2, "logprobs": 4, "prompt_logprobs": 1}
HUGE = 10**5000  # Python does not print it
NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, torch.tensor])
def test_an_integer_of_any_kind_is_an_int(kind):
    params = SamplingParams(**{name: kind(value) for name, value in INTEGERS.items()})
    assert {name: getattr(params, name) for name in INTEGERS} == INTEGERS
    assert {type(getattr(params, name)) for name in INTEGERS} == {int}
    params = SamplingParams(stop_token_ids=[kind(3), 4], logit_bias={int(kind(3)): kind(2)})
    assert params.stop_token_ids == (3, 4) and params.logit_bias == {3: 2.0}
    assert {type(item) for item in params.stop_token_ids} == {int}


@pytest.mark.parametrize("kind", [float, int, np.float32, np.float64, np.int32, Fraction, torch.tensor])
def test_a_number_of_any_kind_is_a_float(kind):
    params = SamplingParams(**{name: kind(1) for name in NUMBERS}, logit_bias={np.int64(7): kind(1)})
    assert [type(getattr(params, name)) for name in NUMBERS] == [float] * len(NUMBERS)
    assert [getattr(params, name) for name in NUMBERS] == [1.0] * len(NUMBERS)
    assert params.logit_bias == {7: 1.0} and [*map(type, params.logit_bias)] == [int]


def test_lists_are_tuples_and_one_stop_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = math.nan  # what the caller does to it later changes no answer
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 2.0, True, np.True_, "2", math.nan, [2], np.float64(2), HUGE, -HUGE], ids=type)
def test_what_is_no_integer_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name} is .*, expected an integer from "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, -math.inf, True, "1", b"1", [1], 1j, 10**400, np.float32("nan")]
)
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name} is .*, expected a number from \S+ to "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": [5]}, "stop has 5, expected strings"),
        ({"stop": 5}, "stop is 5, expected a list"),
        ({"stop": None}, "stop is None, expected a list"),
        ({"stop": b"x"}, "stop is b'x', expected a list"),
        ({"stop": ["a", ""]}, "stop has an empty string"),
        ({"stop": "x" * (MAX_STOP_CHARACTERS + 1)}, "1025 characters, expected at most 1024"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop has more than 256 entries"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids is 1.5, expected an integer from 0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12', expected a list"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3, expected a list"),
        ({"stop_token_ids": range(10**12)}, "stop_token_ids has more than 256 entries"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\], expected a mapping"),
        ({"logit_bias": {"5": 1.0}}, "a token id of logit_bias is '5', expected an integer"),
        ({"logit_bias": {5: "1"}}, r"logit_bias\[5\] is '1', expected a number from -100 to 100"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\] is nan"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 0.0)}, "logit_bias has 4097 entries"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected True or False"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
        ({"constraint": "{}"}, "constraint is '{}', expected a tilewright.types.Constraint"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3, more than max_tokens, 2"),
        ({"top_k": -1}, "top_k is -1, expected an integer from 0 to 2147483647"),
        ({"max_tokens": 0}, "max_tokens is 0, expected an integer from 1 to 9223372036854775807"),
        ({"seed": 2**64}, "seed is 18446744073709551616, expected an integer from -9223372036854775808"),
    ],
)
def test_refusals_name_field_value_and_limit(fields, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**fields)


def test_a_constraint_is_text():
    with pytest.raises(RequestError, match=r"constraint source is \{'type': 'object'\}, expected text"):
        Constraint("json_schema", {"type": "object"})


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.lists(st.one_of(st.integers(), st.text(), st.floats(), st.none())),
    st.dictionaries(st.one_of(st.integers(), st.text()), st.one_of(st.floats(), st.text())),
    st.builds(object),
)  # fmt: skip


@given(st.sampled_from(list(SamplingParams.__dataclass_fields__)), ANYTHING)
def test_anything_is_taken_as_annotated_or_refused(name, value):
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert name in str(error) and ("expected" in str(error) or "more than" in str(error))
        return
    made = getattr(params, name)
    allowed = {
        "stop": (tuple,), "stop_token_ids": (tuple,), "logit_bias": (dict,), "ignore_eos": (bool,),
        "constraint": (type(None),), "voice": (str, type(None)),
    }  # fmt: skip
    if name in NUMBERS:
        assert type(made) is float and math.isfinite(made)
    elif name in INTEGERS:
        assert made is None or type(made) is int
    else:
        assert type(made) in allowed[name]
    assert params == SamplingParams(**{name: made})
