"""The Responses interface through the official client."""

import json

import openai
import pytest
from test_chat_completions import image_part

TOOL = {
    "type": "function",
    "name": "lay_tile",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(chat_server):
    return chat_server.client()


def respond(client, given="What is a tile?", **options):
    return client.responses.create(
        **{"model": "", "input": given, "max_output_tokens": 12, "temperature": 0, **options}
    )


def test_an_answer_is_that_of_a_chat(client):
    answer = respond(client, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tile?"}]
    chat = client.chat.completions.create(model="", messages=messages, max_tokens=12, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")


def test_a_stream_says_the_same(client):
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_previous_response_id(client):
    first = respond(client)
    second = respond(client, "And a wall?", previous_response_id=first.id)
    said = [
        {"role": "user", "content": "What is a tile?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And a wall?"},
    ]
    chat = client.chat.completions.create(model="", messages=said, max_tokens=12, temperature=0)
    assert second.output_text == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="resp_unknown"):
        respond(client, previous_response_id="resp_unknown")
    unkept = respond(client, store=False)
    with pytest.raises(openai.BadRequestError, match="the id of a stored response"):
        respond(client, previous_response_id=unkept.id)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_forced_tool_call_and_its_result(client, is_stream):
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    answer = respond(client, extra_body=THINKING_OFF, stream=is_stream, **options)
    if is_stream:
        *_, last = answer
        answer = last.response
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "lay_tile" and json.loads(call.arguments)["colour"] in ("red", "blue")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "laid"}
    assert respond(client, [result], previous_response_id=answer.id, tools=[TOOL]).usage.input_tokens > 0


def test_json(client):
    schema = {"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}
    text = {"format": {"type": "json_schema", "name": "t", "schema": {**schema, "additionalProperties": False}}}
    answer = respond(client, text=text, max_output_tokens=3000, temperature=1, extra_body={**THINKING_OFF, "seed": 1})
    assert isinstance(json.loads(answer.output_text)["large"], bool)


def test_images(vision_server):
    url = image_part()["image_url"]["url"]
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "Which colour?"}]
    client = vision_server.client()
    answer = respond(client, [{"role": "user", "content": parts}])
    messages = [{"role": "user", "content": [image_part(), {"type": "text", "text": "Which colour?"}]}]
    chat = client.chat.completions.create(model="", messages=messages, max_tokens=12, temperature=0)
    assert answer.output_text == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"given": []}, "input"),
        ({"background": True}, "background"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
        ({"given": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
    ],
)
def test_invalid_requests(client, options, message):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **options)
    assert message in caught.value.message


def test_a_lost_engine_fails_the_response(scripted):
    from tilewright.server.http.settings import ServerSettings

    running, _ = scripted(settings=ServerSettings(request_timeout_s=0.2), holds_back=True)
    *_, last = running.client().responses.create(model="", input="hi", stream=True)
    assert last.type == "response.failed" and "longer than 0.2 s" in last.response.error.message
