"""Llama-3.2-Vision behind the server, as users start it: pictures of all kinds, what is refused, and the benchmark."""

import json

import openai
import pytest
from chat_parts import image, text, user
from serve_process import ServerProcess
from tiny_checkpoint import write_cross_model

from tilewright import cli

# As the released one: no system message beside pictures, and parts only of the types it knows.
STRICT = """{%- set seen = namespace(pictures=false) -%}
{%- for message in messages if message['content'] is not string -%}
{%- for part in message['content'] if part['type'] == 'image' -%}{%- set seen.pictures = true -%}{%- endfor -%}
{%- endfor -%}
{%- if seen.pictures and messages[0]['role'] == 'system' -%}
{{- raise_exception('Prompting with images is incompatible with system messages.') -}}
{%- endif -%}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_cross_model(tmp_path_factory.mktemp("cross"))
    template = folder / "chat_template.jinja"
    template.write_text(STRICT + template.read_text())
    process = ServerProcess(folder, "--kv-memory", "1MB", "--max-context", "512")
    yield process
    process.end()


def answer(server, *messages, **options):
    made = server.client().chat.completions.create(
        model="", messages=list(messages), max_tokens=6, temperature=0, extra_body={"ignore_eos": True}, **options
    )
    assert made.usage.completion_tokens == 6 * options.get("n", 1)
    return made


@pytest.mark.parametrize("size", [(1, 1), (900, 2), (2, 900), (16, 16), (100, 100)])
def test_pictures_of_any_form(server, size):
    assert answer(server, user(image(*size), text("what?"))).usage.prompt_tokens == 27


def test_wherever_a_picture_stands(server):
    one, other = image(20, 20), image(20, 40, 1, "RGBA")
    assistant = {"role": "assistant", "content": "hm"}
    for messages in (
        [user(one)],
        [user(text("x"), one)],
        [user(one, text("and"), one, text("x"))],
        [user(one, other, text("x")), assistant, user(text("and"), other)],
        [user(text("x")), {"role": "assistant", "content": [one]}, user(text("so?"))],
    ):
        first = answer(server, *messages).choices[0].message.content
        assert {choice.message.content for choice in answer(server, *messages, n=2).choices} == {first}


def test_a_picture_of_an_earlier_turn_is_still_seen(server):
    rest = [{"role": "assistant", "content": "hm"}, user(text("and now?"))]
    logprobs = [
        answer(server, user(image(20, 20, seed), text("x")), *rest, logprobs=True).choices[0].logprobs.content[0]
        for seed in (1, 2)
    ]
    assert logprobs[0].logprob != logprobs[1].logprob


VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TORN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user(VIDEO, text("x"))], "video 1: the model accepts text and image"),
        ([user(SOUND, text("x"))], "audio 1: the model accepts text and image"),
        ([user(TORN, text("x"))], "image 1: not an image"),
        ([SYSTEM, user(image(9, 9), text("x"))], "incompatible with system messages"),
        ([user(*(image(9, 9, seed) for seed in range(33)))], "image 33: the request has more than 32"),
        ([user(*(image(32, 32, seed) for seed in range(9)))], "9 images side by side are 612 encoder states"),
    ],
)
def test_what_is_refused(server, messages, words, stream):
    with pytest.raises(openai.BadRequestError, match=words):
        server.client().chat.completions.create(model="", messages=messages, max_tokens=4, stream=stream)
    assert answer(server, user(text("still there?")))


def test_a_placeholder_in_the_text_of_a_message_is_text(server):
    placeholder, word = (answer(server, user(text(f"see {it}"))).usage.prompt_tokens for it in ("<|image|>", "x"))
    assert placeholder > word  # its letters, not one token that a picture would have to stand for


def test_the_benchmark_with_pictures(server, tmp_path, capsys):
    path = tmp_path / "serve.json"
    flags = ["--requests", "6", "--warmup", "1", "--concurrency", "3", "--prompt-tokens", "2-6", "--output-tokens", "5"]
    pictures = ["--pictures", "2", "--picture-size", "60x30", "--no-limits", "--json", str(path)]
    assert cli.main(["bench", "serve", server.url, *flags, *pictures]) == 0, capsys.readouterr().err
    document = json.loads(path.read_text())
    assert document["totals"]["num_answered"] == 6 and document["totals"]["num_failed"] == 0
    assert all(sample["output_tokens"] == 5 for sample in document["samples"])
    assert cli.main(["bench", "serve", server.url, *flags, *pictures, "--same-media"]) == 0
    refused = cli.main(["bench", "serve", server.url, *flags, *pictures, "--system", "Be brief."])
    printed = capsys.readouterr()
    assert refused != 0 and "incompatible with system messages" in printed.out + printed.err
