import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from output_answers import WEATHER

from tilewright.inputs.messages import normalize
from tilewright.server.api.responses.request import ResponseHistory, chat_body
from tilewright.server.api.responses.writer import ResponseBuilder
from tilewright.server.output import Piece, ToolCallDelta, check_tools
from tilewright.types import RequestError

USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def messages(given, **request):
    return chat_body({"input": given, **request})["messages"]


def test_text_is_a_message_of_the_user():
    assert chat_body({"model": "m", "input": "Hi", "temperature": 0, "stream": True, "max_output_tokens": 9}) == {
        "model": "m",
        "temperature": 0,
        "stream": True,
        "max_completion_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
    }


def test_what_is_null_is_as_if_it_were_not_there():
    names = ["temperature", "tools", "tool_choice", "text", "reasoning", "metadata", "previous_response_id", "include"]
    assert chat_body({"input": "Hi", **dict.fromkeys(names), "instructions": None}) == chat_body({"input": "Hi"})


def test_system_messages_at_the_beginning_are_one():
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Say you."}]}
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be brief.\n\nSay you."}
    assert messages([developer, user], instructions="Be brief.") == [system, user]
    assert messages([{**developer, "content": "Be brief."}, developer, user]) == [system, user]
    assert messages([user, developer]) == [user, {"role": "system", "content": "Say you."}]
    assert messages("Hi", instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_parts():
    parts = [
        {"type": "input_text", "text": "Who"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    (message,) = messages([{"type": "message", "role": "user", "content": parts}])
    assert message["content"][0] == {"type": "text", "text": "Who"}
    assert message["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"},
    }
    _, media = normalize([message])
    assert [medium.kind for medium in media] == ["image", "audio"], "as chat takes them"
    two = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages([{"role": "user", "content": two}]) == [{"role": "user", "content": "a\nb"}]


def call(number):
    return {"type": "function_call", "call_id": f"call_{number}", "name": "get_weather", "arguments": "{}"}


def chat_call(number):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


def output(number, content="sunny"):
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": content}


def chat_output(number, content="sunny"):
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "get_weather", "content": content}


def test_what_a_model_said_in_one_go_is_one_message():
    user = {"role": "user", "content": "Hi"}
    reasoning = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    summed = {"id": "rs_2", "type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    sealed = {"id": "rs_3", "type": "reasoning", "summary": [], "encrypted_content": "x", "content": None}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Wait", "annotations": []}],
    }
    assert messages(
        [user, reasoning, summed, sealed, said, call(1), call(2), output(1), output(2), reasoning, said, said]
    ) == [
        user,
        {
            "role": "assistant",
            "reasoning_content": "hm\nso",
            "content": "Wait",
            "tool_calls": [chat_call(1), chat_call(2)],
        },
        chat_output(1),
        chat_output(2),
        {"role": "assistant", "reasoning_content": "hm", "content": "Wait"},
        {"role": "assistant", "content": "Wait"},
    ]
    assert messages([user, call(1), said, reasoning, call(2), reasoning]) == [
        user,
        {"role": "assistant", "content": "", "tool_calls": [chat_call(1)]},
        {"role": "assistant", "content": "Wait"},
        {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [chat_call(2)]},
    ]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages([call(1), output(1, parts)])[1] == chat_output(1, "a\nb")


def test_tools_formats_and_reasoning():
    flat = {"type": "function", **WEATHER["function"], "strict": None}
    body = chat_body(
        {
            "input": "Hi",
            "tools": [flat],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "none", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            "include": ["reasoning.encrypted_content"],
            "user": "u",
            "seed": 3,
        }
    )
    assert body["tools"] == [WEATHER]
    check_tools(body["tools"])
    assert body["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert body["parallel_tool_calls"] is False
    assert body["reasoning_effort"] == "none"
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert (body["user"], body["seed"]) == ("u", 3)
    for choice in ("none", "auto", "required"):
        assert chat_body({"input": "Hi", "tool_choice": choice})["tool_choice"] == choice
    for kind in ("text", "json_object"):
        assert chat_body({"input": "Hi", "text": {"format": {"type": kind}}})["response_format"] == {"type": kind}
    assert "response_format" not in chat_body({"input": "Hi", "text": {"verbosity": "low"}})


def part(**fields):
    return {"input": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "input is None"),
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}]}, "input is empty"),
        ({"input": ["Hi"]}, r"input\[0\] is a str"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]\.type is 'item_reference'"),
        ({"input": [{"role": "boss", "content": "Hi"}]}, r"input\[0\]\.role is 'boss'"),
        ({"input": [{"role": "user"}]}, r"input\[0\]\.content is None"),
        (part(type="input_file", file_id="f"), r"content\[0\]\.type is 'input_file'.* files are not supported"),
        (part(type="input_image", file_id="f"), "file_id is given, expected image_url"),
        (part(type="input_image"), "image_url is None"),
        (part(type="input_text"), r"content\[0\]\.text is None"),
        (part(type="hologram"), "type is 'hologram'"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]}, "has a medium"),
        ({"input": [{"type": "reasoning", "content": [{"type": "input_text", "text": "x"}]}]}, "reasoning_text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id is None"),
        ({"input": [{**call(1), "arguments": {}}]}, "arguments is {}"),
        ({"input": [output(1)]}, r"input\[0\]\.call_id is 'call_1', expected the call_id of an earlier"),
        ({"input": "Hi", "instructions": ["x"]}, "instructions is"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, r"tools\[0\]\.type is 'web_search'"),
        ({"input": "Hi", "tools": [WEATHER]}, r"tools\[0\] has function, expected name"),
        ({"input": "Hi", "tools": {"a": 1}}, "tools is a dict"),
        ({"input": "Hi", "tool_choice": {"type": "web_search"}}, "tool_choice is"),
        ({"input": "Hi", "tool_choice": "any"}, "tool_choice is 'any', expected none, auto, required or"),
        ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format is"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema is None"),
        ({"input": "Hi", "text": "json"}, "text is 'json'"),
        ({"input": "Hi", "reasoning": "high"}, "reasoning is 'high'"),
        ({"input": "Hi", "include": ["message.output_text.logprobs"]}, "include has message.output_text.logprobs"),
        ({"input": "Hi", "metadata": {"a": 1}}, "metadata is"),
        ({"input": "Hi", "metadata": {str(number): "" for number in range(17)}}, "17 entries, expected at most 16"),
        ({"input": "Hi", "metadata": {"a": "b" * 513}}, "value of 513"),
    ],
)
def test_invalid_requests_are_refused(request_, message):
    with pytest.raises(RequestError, match=message):
        chat_body(request_)


def answered(request):
    builder = ResponseBuilder(request, model="m")
    builder.add(
        [
            Piece(reasoning="hm"),
            Piece(content="Wait"),
            Piece(tool_call=ToolCallDelta(0, "", id="call_1", name="get_weather")),
            Piece(tool_call=ToolCallDelta(0, "{}")),
        ]
    )
    builder.finish("tool_calls", USAGE)
    return builder.response()


def test_a_response_goes_back_as_input():
    """As clients do it: output = response.output; input += output."""
    response = Response.model_validate(answered({"input": "Hi"}))
    items = [item.model_dump() for item in response.output]
    (answer,) = messages(items)
    assert answer == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "Wait",
        "tool_calls": [chat_call(1)],
    }


def test_a_request_continues_an_earlier_response():
    history = ResponseHistory()
    first = history.resolve({"input": "Hi", "instructions": "Be brief."})
    response = answered(first)
    history.keep(first, response)
    request = {"input": [output(1)], "previous_response_id": response["id"]}
    second = history.resolve(request)
    assert messages(second["input"]) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Wait", "tool_calls": [chat_call(1)]},
        chat_output(1),
    ]
    assert answered(second)["previous_response_id"] == response["id"]
    with pytest.raises(RequestError, match="previous_response_id is 'resp_x', expected the id of a stored response"):
        history.resolve({"input": "Hi", "previous_response_id": "resp_x"})
    with pytest.raises(RequestError, match=r"previous_response_id is \['a'\]"):
        history.resolve({"input": "Hi", "previous_response_id": ["a"]})


def test_history_respects_store_and_its_limit():
    def is_kept(response):
        try:
            history.resolve({"input": "", "previous_response_id": response["id"]})
        except RequestError:
            return False
        return True

    history = ResponseHistory(max_size_bytes=10_000)
    unwanted = {"input": "Hi", "store": False}
    response = answered(unwanted)
    history.keep(unwanted, response)
    assert not is_kept(response)
    request = {"input": "x" * 3000}
    first, second, third, fourth = (answered(request) for _ in range(4))
    for response in (first, second):
        history.keep(request, response)
    assert is_kept(first)  # and used just now
    for response in (third, fourth):
        history.keep(request, response)
    assert [is_kept(response) for response in (first, second, third, fourth)] == [False, False, True, True]
    huge = {"input": "x" * 20_000}
    response = answered(huge)
    history.keep(huge, response)
    assert not is_kept(response)
    assert is_kept(fourth)
    failed = ResponseBuilder(request, model="m")
    failed.fail("out of memory")
    history.keep(request, failed.response())
    assert not is_kept(failed.response())


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["function", "json_schema", "message", "input_text", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "format", "name", "schema"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
NAMES = ["tools", "tool_choice", "text", "reasoning", "metadata", "include", "instructions", "prompt", "top_logprobs"]


INPUTS = VALUES | st.lists(VALUES) | st.builds(lambda part: [{"role": "user", "content": [part]}], VALUES)


@given(given_input=INPUTS, rest=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))
def test_any_request_is_a_chat_s_body_or_refused(given_input, rest):
    try:
        body = chat_body({"input": given_input, **rest})
    except RequestError:
        return
    assert body["messages"]
