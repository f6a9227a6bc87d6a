import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from output_answers import HERMES, TOOLS, WEATHER
from pydantic import TypeAdapter

from tilewright.server.api.responses.writer import ResponseBuilder
from tilewright.server.output import OutputParser, Piece, ToolCallDelta

EVENTS = TypeAdapter(ResponseStreamEvent)
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
REQUEST = {
    "input": "Hi",
    "model": "alias",
    "instructions": "Be brief.",
    "max_output_tokens": 50,
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "tool_choice": "required",
    "tools": [{"type": "function", **WEATHER["function"]}],
    "top_p": 0.9,
    "truncation": "disabled",
    "user": "u",
}
ANSWER = [
    Piece(reasoning="I "),
    Piece(reasoning="wonder"),
    Piece(content="Let me "),
    Piece(content="see"),
    Piece(tool_call=ToolCallDelta(0, "", id="call_a", name="get_weather")),
    Piece(tool_call=ToolCallDelta(0, '{"city":')),
    Piece(tool_call=ToolCallDelta(0, ' "Köln"}')),
    Piece(tool_call=ToolCallDelta(1, "", id="call_b", name="stop.now")),
    Piece(tool_call=ToolCallDelta(1, "{}")),
]


def checked(events):
    """The events, each valid by OpenAI's own types: every field they require is there, and of its type."""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        known = EVENTS.validate_python(event)
        assert known.type == event["type"], "it fits no other member of the union by chance"
        assert json.loads(known.model_dump_json(by_alias=True, exclude_unset=True)) == event
    return events


def streamed(pieces, finish_reason="stop", request=REQUEST):
    builder = ResponseBuilder(request, model="m")
    events = builder.begin()
    for piece in pieces:
        events += builder.add([piece])
    events += builder.finish(finish_reason, USAGE)
    return checked(events), builder.response()


def test_the_events_of_an_answer():
    events, response = streamed(ANSWER, "tool_calls")
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["output_index"] for event in events if "output_index" in event] == [0] * 7 + [1] * 7 + [2] * 5 + [
        3
    ] * 4
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"] == events[-1]["response"]["output"]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress"


@pytest.mark.parametrize("kind", ["output_text.delta", "output_text.done", "reasoning_text.delta", "content_part.added",
                                  "output_item.done", "function_call_arguments.done", "completed"])  # fmt: skip
def test_the_check_of_events_would_tell(kind):
    events, _ = streamed(ANSWER)
    event = next(event for event in events if event["type"] == f"response.{kind}")
    for name in set(event) - {"name"}:  # of a call: OpenAI's servers send it, their types do not ask for it
        with pytest.raises((ValueError, AssertionError, KeyError)):
            checked([{key: value for key, value in {**event, "sequence_number": 0}.items() if key != name}])


def test_the_response():
    _, response = streamed(ANSWER, "tool_calls")
    known = Response.model_validate(response)
    assert json.loads(known.model_dump_json(by_alias=True, exclude_unset=True)) == response
    assert known.output_text == "Let me see"
    reasoning, text, first, second = known.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "I wonder")
    assert (text.type, text.status) == ("message", "completed")
    assert (first.call_id, first.name, first.arguments) == ("call_a", "get_weather", '{"city": "Köln"}')
    assert (second.call_id, second.name, second.arguments) == ("call_b", "stop.now", "{}")
    assert len({item.id for item in known.output}) == 4
    assert known.status == "completed"
    assert known.completed_at >= known.created_at
    assert known.model == "m"
    assert (known.usage.input_tokens, known.usage.output_tokens, known.usage.total_tokens) == (5, 7, 12)
    assert known.usage.input_tokens_details.cached_tokens == 3
    assert known.usage.output_tokens_details.reasoning_tokens == 2
    for name, value in REQUEST.items():
        if name not in ("input", "model"):
            assert response[name] == value


def test_a_bare_request_has_defaults():
    _, response = streamed([Piece(content="Hi")], request={"input": "Hi"})
    known = Response.model_validate(response)
    assert (known.tool_choice, known.tools, known.parallel_tool_calls) == ("auto", [], True)
    assert known.text.format.type == "text"
    assert (known.truncation, known.metadata, known.previous_response_id) == ("disabled", {}, None)


def test_an_answer_cut_off_is_incomplete():
    events, response = streamed(ANSWER[:6], "length")
    assert events[-1]["type"] == "response.incomplete"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["output"][-1]["arguments"] == '{"city":'


def test_an_answer_that_failed():
    builder = ResponseBuilder(REQUEST, model="m")
    events = checked([*builder.begin(), *builder.add(ANSWER[:4]), *builder.fail("the engine went away")])
    assert events[-1]["type"] == "response.failed"
    known = Response.model_validate(builder.response())
    assert known.status == "failed"
    assert (known.error.code, known.error.message) == ("server_error", "the engine went away")
    assert [item.status for item in known.output] == ["completed", "incomplete"]
    builder = ResponseBuilder(REQUEST, model="m")
    checked([*builder.begin(), *builder.fail("at once", code="invalid_prompt")])


def test_an_empty_answer():
    events, response = streamed([])
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert Response.model_validate(response).output_text == ""


PIECES = st.lists(
    st.builds(lambda text: Piece(content=text), st.text(min_size=1))
    | st.builds(lambda text: Piece(reasoning=text), st.text(min_size=1))
    | st.just("call")
    | st.text(min_size=1),
    max_size=12,
)


@settings(deadline=None)
@given(PIECES, st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_order_of_pieces_makes_good_events(drawn, finish_reason):
    """Events put together give the response, and every item that is added is done."""
    pieces, num_calls = [], 0
    for piece in drawn:
        if piece == "call":
            pieces.append(Piece(tool_call=ToolCallDelta(num_calls, "", id=f"call_{num_calls}", name="f")))
            num_calls += 1
        elif isinstance(piece, str):
            last = pieces[-1].tool_call if pieces else None
            if last is not None:
                pieces.append(Piece(tool_call=ToolCallDelta(last.index, piece)))
        else:
            pieces.append(piece)
    events, response = streamed(pieces, finish_reason)
    texts = ["" for _ in response["output"]]
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    final = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in response["output"]]
    assert texts == final
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert added == done == list(range(len(texts)))


@pytest.fixture
def client():
    """OpenAI's client, whose requests are answered here: a model that thinks, speaks and calls."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nLet me see\n{call}"

    def answer(http_request):
        request = json.loads(http_request.content)
        parser = OutputParser(tool_syntax=HERMES, tools=TOOLS, opens_reasoning=False, splits_reasoning=True)
        builder = ResponseBuilder(request, model="m")
        events = builder.begin()
        for character in text:
            events += builder.add(parser.push(character))
        events += builder.add(parser.finish())
        events += builder.finish("tool_calls", USAGE)
        if not request.get("stream"):
            return httpx.Response(200, json=builder.response())
        body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, content=body.encode(), headers={"content-type": "text/event-stream"})

    with httpx.Client(transport=httpx.MockTransport(answer)) as http_client:
        yield OpenAI(api_key="none", base_url="http://test.invalid/v1", http_client=http_client)


TOOL = {"type": "function", **WEATHER["function"], "strict": False}


def test_openai_s_client_reads_the_response(client):
    response = client.responses.create(model="m", input="Hi", tools=[TOOL])
    assert response.output_text == "Let me see"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


def test_openai_s_client_reads_the_stream(client):
    events = list(client.responses.create(model="m", input="Hi", tools=[TOOL], stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Let me see"
    with client.responses.stream(model="m", input="Hi", tools=[TOOL]) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert response.output_text == "Let me see"
    assert json.loads(response.output[2].arguments) == {"city": "Köln"}
