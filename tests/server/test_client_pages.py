"""Examples of docs/clients.md run as they stand against `tilewright serve`, and Open WebUI's requests are answered."""

import base64
import io
import json
import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from typing import NamedTuple

import openai
import pytest
from conftest import ScriptedBackend, serving
from examples import CLIENTS, sections
from PIL import Image
from serve_process import ServerProcess
from sources import ROOT
from tiny_checkpoint import write_vision_model

from tilewright import cli
from tilewright.cli import serve
from tilewright.server.http.settings import ServerSettings

PAGE = ROOT / "docs" / CLIENTS
TEMPLATE = ROOT / "tests" / "data" / "qwen3_vl.jinja"  # knows tools, images and videos
BASE_URL, KEY, MODEL = "http://127.0.0.1:8000", "secret", "Qwen3-VL-2B-Instruct"  # as the pages have them


class Example(NamedTuple):
    """A fenced block, and the Python block that its section begins with, which it may count on."""

    where: str
    language: str
    code: str
    first: str


def examples_of(client, text):
    blocks = list(re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE))
    assert text.count("```") == 2 * len(blocks), f"{client} has a fence that is not read as a block"
    first = next((block[2] for block in blocks if block[1] == "python"), "")
    for number, block in enumerate(blocks, 1):
        yield Example(f"{client} {number}", block[1], block[2], "" if block[2] == first else first)


EXAMPLES = {
    example.where: example
    for client, text in sections(PAGE.read_text()).items()
    for example in examples_of(client, text)
}
CURL, OPENAI, LANGCHAIN = "curl", "OpenAI's Python client", "LangChain"


def example_with(client, text):
    (found,) = [one for one in EXAMPLES.values() if one.where.startswith(client) and text in one.code]
    return found


def image():
    """A small JPEG."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((48, 32)).convert("RGB").save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def run_example(tmp_path, monkeypatch, capfd):
    """Runs an Example, in a folder with photo.jpg, against a server's address; returns what it printed."""
    (tmp_path / "photo.jpg").write_bytes(image())
    (tmp_path / ".curlrc").write_text("fail-with-body\nmax-time = 60\n")

    def run(example, url):
        monkeypatch.chdir(tmp_path)
        code, first = (text.replace(BASE_URL, url) for text in (example.code, example.first))
        if example.language == "python":
            namespace = {"__name__": "example"}
            exec(compile(first, f"the first of {example.where}", "exec"), namespace)
            capfd.readouterr()
            exec(compile(code, example.where, "exec"), namespace)
        else:
            environment = {**os.environ, "CURL_HOME": str(tmp_path), "TILEWRIGHT_API_KEY": KEY}
            subprocess.run(["bash", "-euo", "pipefail", "-c", code], env=environment, check=True, timeout=90)
        return capfd.readouterr().out

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`tilewright serve` as the pages have it, in front of a tiny Qwen3-VL with the real one's chat template."""
    folder = write_vision_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 4096  # a token is a byte, and tools take many
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    process = ServerProcess(folder, "--name", MODEL, TILEWRIGHT_API_KEY=KEY)
    yield process
    process.end()


@pytest.mark.parametrize("where", EXAMPLES)
def test_an_example_ends_well(where, server, run_example):
    try:
        assert run_example(EXAMPLES[where], server.url).strip()
    except openai.LengthFinishReasonError as error:
        # Held to a schema, a model with random weights may write blanks until it has no tokens left.
        assert "response_format" in EXAMPLES[where].code or "with_structured_output" in EXAMPLES[where].code
        assert error.completion.choices[0].message.content.lstrip().startswith("{")


def test_every_section_is_read():
    assert {example.language for example in EXAMPLES.values()} == {"python", "bash"}
    for client, least in ((OPENAI, 7), (LANGCHAIN, 6), (CURL, 5)):
        assert sum(where.startswith(client) for where in EXAMPLES) >= least


def serve_lines():
    joined = PAGE.read_text().replace("\\\n", " ")
    return {line.strip() for line in joined.splitlines() if re.match(r" {4}.*tilewright serve ", line)}


def options_of(line):
    words = shlex.split(line)
    return cli._parser().parse_args(words[words.index("tilewright") + 1 :])


@pytest.mark.parametrize("line", sorted(serve_lines()))
def test_the_server_takes_the_flags_of_the_page(line):
    assert options_of(line).model in (f"./{MODEL}", "./Qwen3-Omni-30B-A3B-Instruct")  # the one that speaks


def test_a_server_for_containers_answers_to_the_name_they_use():
    (line,) = [line for line in serve_lines() if "--host 0.0.0.0" in line]
    settings = serve.make_settings(options_of(line))
    assert set(settings.allowed_hosts) == {"host.docker.internal", "127.0.0.1"}


def test_a_stream_by_curl_is_whole(server, run_example):
    out = run_example(example_with(CURL, '"stream": true'), server.url)
    assert out.startswith("data: {") and out.endswith("data: [DONE]\n\n")


class ScriptedModel(ScriptedBackend):
    """Calls a tool twice, then repeats their results; with a constraint it answers with a report."""

    CALL = '<tool_call>\n{{"name": "temperature", "arguments": {{"{}": "{}"}}}}\n</tool_call>'
    REPORT = '{"kind": "bug", "severity": 2, "summary": "Upside down"}'

    def __init__(self, parameter="city"):
        super().__init__(template=TEMPLATE.read_text())
        self.calls = [self.CALL.format(parameter, city) for city in ("Berlin", "Lisbon")]

    def submit(self, request, listener):
        results = [message["content"] for message in request.messages if message["role"] == "tool"]
        if "constraint" in request.sampling:
            self.pieces = [self.REPORT]
        else:
            self.pieces = ["The tools say: ", "; ".join(results)] if results else self.calls
        return super().submit(request, listener)


@pytest.fixture
def ask_script(run_example):
    """Runs an Example against a ScriptedModel."""

    def run(example, model):
        with serving(lambda: model, ServerSettings(served_name=MODEL, api_keys=(KEY,))) as running:
            return run_example(example, running.url)

    return run


@pytest.mark.parametrize("client", [OPENAI, LANGCHAIN])
def test_what_tools_return_comes_back_to_the_model(client, ask_script):
    model = ScriptedModel()
    out = ask_script(example_with(client, "tool_calls"), model)
    assert out == "The tools say: 12 degrees; 21 degrees\n"
    *_, first, second = model.requests
    assert first.tools[0]["function"]["parameters"]["required"] == ["city"]
    call_message, *results = second.messages[-3:]
    assert [call["id"] for call in call_message["tool_calls"]] == [result["tool_call_id"] for result in results]


@pytest.mark.parametrize("client", [OPENAI, LANGCHAIN])
def test_a_call_with_wrong_arguments_is_reported(client, ask_script):
    out = ask_script(example_with(client, "tool_calls"), ScriptedModel(parameter="town"))
    assert out.startswith("The tools say: ") and "error" in out


@pytest.mark.parametrize("client", [OPENAI, LANGCHAIN])
def test_a_schema_reaches_the_engine_and_its_answer_the_class(client, ask_script):
    model = ScriptedModel()
    assert ask_script(example_with(client, "class Report"), model) == "bug 2 Upside down\n"
    constraint = model.requests[-1].sampling["constraint"]
    assert constraint.kind == "json_schema"
    properties = json.loads(constraint.source)["properties"]
    assert properties["kind"]["enum"] == ["bug", "wish", "question"]
    assert properties["severity"]["maximum"] == 5 and properties["summary"]["maxLength"] == 80


# What Open WebUI 0.10 sends, and what of its own older ones and filters let through.
OWN_FIELDS = {
    "chat_id": "6a1d",
    "session_id": "kT3",
    "id": "b1",
    "features": {"web_search": False, "memory": True},
    "params": {"function_calling": "native"},
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": False},
    "variables": {"{{USER_NAME}}": "Ada"},
    "metadata": {"user_id": "1", "task": None, "files": []},
    "files": [],
    "tool_ids": [],
    "tool_servers": [],
    "filter_ids": [],
    "model_item": {"id": MODEL, "info": {"params": {"temperature": 2}}},
    "num_ctx": 2048,
    "keep_alive": "5m",
}
QUESTION = {"role": "user", "content": "What is a tile?"}


@pytest.fixture
def web(server):
    """Sends requests with the headers that Open WebUI's have: web(path, body) -> what comes back, line by line."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    headers |= {"X-OpenWebUI-User-Name": "Ada%20L", "X-OpenWebUI-Chat-Id": "6a1d"}

    def send(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{server.url}/v1{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.headers["content-type"], response.read().decode().splitlines()

    return send


def streamed(web, **body):
    """The chunks of a streamed chat."""
    kind, lines = web("/chat/completions", {"model": MODEL, "stream": True, **body})
    assert kind.startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(chunks):
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_open_webui_finds_the_model(web):
    _, lines = web("/models")
    (model,) = json.loads("".join(lines))["data"]
    assert model["id"] == MODEL and model["object"] == "model"


def test_open_webui_streams_an_image_and_its_own_fields_do_no_harm(web):
    url = f"data:image/jpeg;base64,{base64.b64encode(image()).decode()}"
    parts = [{"type": "text", "text": "What is on it?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]}
    body |= {"max_tokens": 40, "stop": ["<never>"], "top_k": 5, "seed": 3, "temperature": 0.7}
    plain = streamed(web, **body)
    chunks = streamed(web, **body, **OWN_FIELDS, stream_options={"include_usage": True})
    assert text_of(chunks) == text_of(plain) != ""
    assert chunks[-1]["choices"] == [] and 0 < chunks[-1]["usage"]["completion_tokens"] <= 40


def test_open_webui_requests_a_title(web):
    task = {"task": "title_generation", "task_body": {"messages": [QUESTION]}, "chat_id": "6a1d"}
    body = {"model": MODEL, "messages": [QUESTION], "stream": False, "max_tokens": 50, "metadata": task}
    _, lines = web("/chat/completions", body)
    choice = json.loads("".join(lines))["choices"][0]
    assert choice["message"]["content"] and choice["finish_reason"] in ("stop", "length")


def test_open_webui_continues_after_its_tools(web):
    parameters = {"type": "object", "properties": {"timezone": {"type": "string"}}, "required": []}
    clock = {"name": "get_current_timestamp", "description": "The time", "parameters": parameters}
    call = {"id": "call_1", "type": "function", "index": 0, "function": {"name": clock["name"], "arguments": "{}"}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    assert text_of(streamed(web, messages=messages, tools=[{"type": "function", "function": clock}], max_tokens=40))


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}])
def test_open_webui_gets_an_error_for_a_wrong_key(server, headers):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/models", headers=headers), timeout=60)
    assert caught.value.code == 401 and "API key" in json.load(caught.value)["error"]["message"]
