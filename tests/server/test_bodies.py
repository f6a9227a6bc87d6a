"""What bodies take beside what OpenAI's documentation shows: clients are not all alike."""

import pydantic
import pytest

from tilewright.server.api.bodies import ChatBody, CompletionBody, ResponsesBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}


@pytest.mark.parametrize(("body", "least"), [(ChatBody, CHAT), (CompletionBody, COMPLETION)])
def test_null_is_the_same_as_left_out(body, least):
    names = [name for name, field in body.model_fields.items() if not field.is_required()]
    nulls = body.model_validate({**least, **dict.fromkeys(names)})
    plain = body.model_validate(least)
    assert len(names) > 15
    assert {name: getattr(nulls, name) for name in names} == {name: getattr(plain, name) for name in names}


def test_null_within_the_options_of_a_stream():
    body = ChatBody.model_validate({**CHAT, "stream": True, "stream_options": {"include_usage": None}})
    assert body.stream_options.include_usage is False


MANY = [1] * 20_000


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (ChatBody, {"messages": MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatBody, {**CHAT, "tools": MANY}),
        (ChatBody, {**CHAT, "stop": MANY}),
        (ChatBody, {**CHAT, "stop_token_ids": ["x"] * 20_000}),
        (ChatBody, {**CHAT, "modalities": MANY}),
        (ChatBody, {**CHAT, "logit_bias": {str(i): "" for i in range(20_000)}}),
        (ChatBody, {**CHAT, "structured_outputs": {"choice": MANY}}),
        (CompletionBody, {"prompt": [""] * 20_000}),
        (CompletionBody, {"prompt": [["x"] * 20_000]}),
        (ResponsesBody, {"input": MANY}),
        (ResponsesBody, {"input": "hi", "tools": MANY}),
    ],
)
def test_many_mistakes_give_one_error(body, given):
    """Checking ends at the first of a list: all of them would take a thousand bytes each, on the event loop."""
    with pytest.raises(pydantic.ValidationError) as caught:
        body.model_validate(given)
    assert caught.value.error_count() <= 5  # one for each member of a union


@pytest.mark.parametrize("name", ["stream", "echo", "max_tokens"])
def test_what_is_neither_null_nor_right_is_refused(name):
    with pytest.raises(pydantic.ValidationError, match=name):
        CompletionBody.model_validate({**COMPLETION, name: "often"})


@pytest.mark.parametrize("user", ["ada", 7, {"name": "Ada", "role": "admin"}, None])
def test_the_user_field_is_ignored(user):
    """Open WebUI sends an object to what it takes for one of its pipelines."""
    assert ChatBody.model_validate({**CHAT, "user": user}).messages[0].content == "hi"
