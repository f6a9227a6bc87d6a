"""Chat through the official client: its answers are those of the engine alone."""

import base64
import io
import json
import re

import openai
import pytest
from PIL import Image

from tilewright.process.frames import encode
from tilewright.server.link.backend import request_to_json

THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
QUESTION = [{"role": "user", "content": "What is a tile?"}]


@pytest.fixture(scope="module")
def client(chat_server):
    return chat_server.client()


def complete(client, **options):
    return client.chat.completions.create(**{"model": "", "messages": QUESTION, "max_tokens": 12, **options})


def test_an_answer_is_the_engines_own(client, chat_engine):
    answer = complete(client, temperature=0)
    alone = chat_engine.chat(QUESTION, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", alone.text)
    assert choice.finish_reason == alone.finish_reason
    assert answer.usage.prompt_tokens == alone.num_prompt_tokens
    assert answer.usage.completion_tokens == len(alone.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same(client):
    whole = complete(client, temperature=0, max_tokens=20)
    chunks = list(complete(client, temperature=0, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_has_no_usage_by_default(client):
    assert all(chunk.usage is None and chunk.choices for chunk in complete(client, stream=True))


def test_several_answers(client):
    answer = complete(client, n=3, temperature=1, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    parts: dict[int, str] = {}
    for chunk in complete(client, n=3, temperature=1, seed=5, stream=True):
        choice = chunk.choices[0]
        parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    assert [parts[index] for index in range(3)] == texts


def test_a_seed_repeats_an_answer(client):
    first, again, other = (complete(client, temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2))
    assert first == again != other


def test_logprobs(client, chat_engine):
    answer = complete(client, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3)
    alone = chat_engine.chat(QUESTION, max_tokens=6, temperature=0, logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [item.logprob for item in content] == pytest.approx([item.logprob for item in alone.logprobs], abs=1e-6)
    assert b"".join(bytes(item.bytes) for item in content).decode("utf-8", "replace") == alone.text
    assert all(len(item.top_logprobs) == 3 and item.top_logprobs[0].logprob >= item.logprob for item in content)
    streamed = [
        item
        for chunk in complete(client, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]
    assert [item.bytes for item in streamed] == [item.bytes for item in content]


def test_stop(client):
    text = complete(client, temperature=0, max_tokens=40).choices[0].message.content
    stop = text[10:12]
    answer = complete(client, temperature=0, max_tokens=40, stop=[stop, "never"])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_max_completion_tokens_is_the_newer_name(client):
    answer = client.chat.completions.create(model="", messages=QUESTION, max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3


SIZED = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


@pytest.mark.parametrize("schema", [None, {**SIZED, "additionalProperties": False}])
def test_json(client, schema):
    response_format = {"type": "json_object"}
    if schema:
        response_format = {"type": "json_schema", "json_schema": {"name": "tile", "schema": schema, "strict": True}}
    answer = complete(client, response_format=response_format, max_tokens=400, seed=3, extra_body=THINKING_OFF)
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        document = json.loads(choice.message.content)
        assert isinstance(document, dict) and (not schema or isinstance(document["size"], int))
    else:  # a random model may write blanks or digits without end
        assert choice.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"regex": "(red|green) tile{2,4}"}, "(red|green) tile{2,4}"),
        ({"choice": ["yes (or so)", "no.\nnever"]}, r"yes \(or so\)|no\.\nnever"),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, "abd|acd"),
        ({"json": {"enum": ["x", 7]}}, r'\s*("x"|7)\s*'),
    ],
)
def test_structured_outputs(client, constraint, allowed):
    answer = complete(client, extra_body={"structured_outputs": constraint, **THINKING_OFF}, max_tokens=100)
    assert re.fullmatch(allowed, answer.choices[0].message.content)


TOOL = {
    "type": "function",
    "function": {
        "name": "lay_tile",
        "description": "Lays a tile",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "is_large": {"type": "boolean"}},
            "required": ["colour", "is_large"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
OTHER_TOOL = {"type": "function", "function": {"name": "stop_work", "parameters": NOTHING}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lay_tile"}}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_forced_tool_call(client, choice, is_stream):
    options = {"tools": [TOOL, OTHER_TOOL], "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    options |= {"max_tokens": 300, "extra_body": THINKING_OFF}
    if is_stream:
        name, arguments, reasons = "", "", []
        for chunk in complete(client, stream=True, **options):
            reasons.append(chunk.choices[0].finish_reason)
            for call in chunk.choices[0].delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        reason = reasons[-1]
    else:
        answer = complete(client, **options).choices[0]
        (call,) = answer.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
        assert call.id.startswith("call_") and call.type == "function"
    assert reason == "tool_calls"
    assert name == "lay_tile" if choice != "required" else name in ("lay_tile", "stop_work")
    if name == "lay_tile":
        document = json.loads(arguments)
        assert document["colour"] in ("red", "blue") and isinstance(document["is_large"], bool)


def test_a_named_function_is_called_once(client):
    """However many calls the model would make."""
    named = {"type": "function", "function": {"name": "stop_work"}}
    options = {"tools": [TOOL, OTHER_TOOL], "max_tokens": 300, "extra_body": THINKING_OFF}
    for seed in range(4):
        (call,) = complete(client, tool_choice=named, seed=seed, **options).choices[0].message.tool_calls
        assert call.function.name == "stop_work"


def test_tool_results_go_back(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "lay_tile", "arguments": '{"colour": "red"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    assert complete(client, messages=messages, tools=[TOOL]).usage.prompt_tokens > 0


def test_calls_and_reasoning_of_a_script(scripted, chat_engine):
    call = '<tool_call>\n{"name": "lay_tile", "arguments": {"colour": "red"}}\n</tool_call>'
    text = f"Let me see.</think>\n\nI will.\n{call}"
    template = chat_engine.loaded.tokenizer.chat_template["default"]
    running, backend = scripted(list(text), template=template, opens_reasoning=True)
    answer = complete(running.client(), tools=[TOOL]).choices[0]
    assert answer.message.reasoning_content == "Let me see."
    assert answer.message.content.strip() == "I will."
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("lay_tile", {"colour": "red"})
    assert answer.finish_reason == "tool_calls"
    assert backend.requests[0].tools[0]["function"]["name"] == "lay_tile"
    deltas = [chunk.choices[0].delta for chunk in complete(running.client(), tools=[TOOL], stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "Let me see."
    pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    assert json.loads("".join(pieces)) == {"colour": "red"} and len(pieces) > 3


def test_no_tools_no_calls(scripted, chat_engine):
    text = '<tool_call>\n{"name": "lay_tile", "arguments": {}}\n</tool_call>'
    running, backend = scripted([text], template=chat_engine.loaded.tokenizer.chat_template["default"])
    assert complete(running.client(), tools=[TOOL], tool_choice="none").choices[0].message.content == text
    assert backend.requests[0].tools is None


def data_url(size=(32, 32), colour="red", form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def image_part():
    return {"type": "image_url", "image_url": {"url": data_url()}}


def test_images(vision_server, vision_engine):
    parts = [image_part(), {"type": "text", "text": "Which colour?"}]
    messages = [{"role": "user", "content": parts}]
    answer = complete(vision_server.client(), messages=messages, temperature=0)
    alone = vision_engine.chat(messages, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == alone.text
    assert answer.usage.prompt_tokens == alone.num_prompt_tokens
    again = complete(vision_server.client(), messages=messages, temperature=0)
    assert again.choices[0].message.content == alone.text


def test_a_data_url_and_the_bytes_are_the_same_image(vision_server, vision_engine):
    """The same answer, and the same key: the prefix cache has for one what was computed for the other."""
    question = {"type": "text", "text": "Which colour is it? " * 20}

    def parts(colour):
        url = data_url((64, 48), colour)
        return [{"type": "image_url", "image_url": {"url": url}}, question]

    as_bytes = [{"type": "image", "image": base64.b64decode(data_url((64, 48), "teal").partition(",")[2])}, question]
    alone = vision_engine.chat([{"role": "user", "content": as_bytes}], max_tokens=12, temperature=0)
    same, other = (
        complete(vision_server.client(), messages=[{"role": "user", "content": parts(colour)}], temperature=0)
        for colour in ("teal", "plum")
    )
    assert same.choices[0].message.content == alone.text
    assert same.usage.prompt_tokens == alone.num_prompt_tokens
    num_cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (same, other)]
    assert num_cached[0] > num_cached[1]


def test_the_engine_process_sees_no_data_url(scripted):
    """Its frame has the bytes raw behind the JSON."""
    running, backend = scripted(accepts=("image", "video", "audio"))
    data = [f"medium {number}".encode() * 30 for number in range(5)]
    text = [base64.b64encode(one).decode() for one in data]
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text[0]}"}},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{text[1]},{text[2]}"}},
        {"type": "input_audio", "input_audio": {"data": text[3], "format": "wav"}},
        {"type": "video", "video": [f"data:image/png;base64,{text[4]}"]},
    ]
    complete(running.client(), messages=[{"role": "user", "content": parts}])
    (request,) = backend.requests
    frame = encode({"submit": "1", "request": request_to_json(request)})
    assert frame[1:] == data
    assert b"base64" not in frame[0] and not [one for one in text if one.encode() in frame[0]]


@pytest.mark.parametrize("text", ["not base64!", "QUJ", ""])
def test_a_broken_data_url_is_named(vision_server, text):
    parts = [image_part(), {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}]
    with pytest.raises(openai.BadRequestError, match="image 2: ") as caught:
        complete(vision_server.client(), messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"n": 0}, "n"),
        ({"extra_body": {"repetition_penalty": 1e-7}}, "repetition_penalty"),
        ({"extra_body": {"top_k": 2**40}}, "top_k"),
        ({"stop": [""]}, "stop has an empty string"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [{"type": "function", "function": {"name": "bad name!"}}]}, "bad name!"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "tile"}}}}, "tile"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tiler", "content": "hi"}]}, "tiler"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "45"),
        ({"messages": [{"role": "user", "content": [image_part()]}]}, "image 1"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, ""),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "one of"),
    ],
)  # fmt: skip
def test_invalid_requests(client, options, message):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert message in caught.value.message
    assert caught.value.body["type"] == "invalid_request_error"
    complete(client)  # and the server goes on


def test_unknown_models_are_named(client):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-99'"):
        complete(client, model="gpt-99")


def test_models(client, chat_server):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    assert complete(client, model=model.id).model == model.id
