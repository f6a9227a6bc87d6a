"""Transcriptions and translations through the official client."""

import json
import urllib.request

import numpy as np
import openai
import pytest
from conftest import serving
from sounds import wav
from tiny_checkpoint import write_omni_model

from tilewright.engine.engine import Engine
from tilewright.server.link.remote import LocalBackend
from tilewright.types import RequestError

SOUND = wav(np.sin(np.arange(24_000) / 12)[:, None] * 0.3, 16_000)
FILE = ("speech.wav", SOUND)
EARS = {"accepts": ("image", "audio")}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_omni_model(tmp_path_factory.mktemp("omni_server"))
    with Engine(folder, pack_cache=False, kv_memory="64MB", max_sequences=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with serving(lambda: LocalBackend(engine)) as running:
        yield running


def test_a_transcription_is_the_engines_answer(server, engine):
    client = server.client()
    heard = client.audio.transcriptions.create(model="", file=FILE, extra_body={"max_completion_tokens": 9})
    parts = [{"type": "audio", "audio": SOUND}, {"type": "text", "text": "Transcribe the audio into text."}]
    alone = engine.chat([{"role": "user", "content": parts}], max_tokens=9, temperature=0)
    assert heard.text == alone.text.lstrip()
    assert heard.usage.type == "tokens" and heard.usage.input_tokens == alone.num_prompt_tokens


def test_chat_with_input_audio_and_a_url(server):
    import base64

    encoded = base64.b64encode(SOUND).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}},
    ]
    answers = [
        server.client().chat.completions.create(
            model="",
            messages=[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}],
            max_tokens=6,
            temperature=0,
        )
        for part in parts
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    (model,) = json.loads(urllib.request.urlopen(f"{server.url}/v1/models").read())["data"]
    assert model["input_modalities"] == ["text", "image", "video", "audio"]


def test_formats_and_what_is_asked(scripted):
    server, backend = scripted((" It", " is late."), **EARS)
    client = server.client()
    whole = client.audio.transcriptions.create(model="scripted", file=FILE, language="de", prompt="Names: Ada")
    assert whole.text == "It is late."
    plain = client.audio.transcriptions.create(model="scripted", file=FILE, response_format="text", temperature=0.5)
    assert plain == "It is late."
    translated = client.audio.translations.create(model="scripted", file=FILE)
    assert translated.text == "It is late."
    first, second, third = backend.requests
    asked = [request.messages[0]["content"] for request in backend.requests]
    assert all(parts[0] == {"type": "audio", "audio": SOUND} for parts in asked)
    assert asked[0][1]["text"] == "Transcribe the German audio into text. Context: Names: Ada"
    assert asked[2][1]["text"] == "Translate the speech in the audio into English text."
    assert [request.sampling["temperature"] for request in (first, second, third)] == [0.0, 0.5, 0.0]


def test_a_stream(scripted):
    server, _ = scripted((" It", " is", " late."), **EARS)
    events = list(server.client().audio.transcriptions.create(model="scripted", file=FILE, stream=True))
    assert [event.delta for event in events[:-1]] == ["It", " is", " late."]
    assert events[-1].type == "transcript.text.done" and events[-1].text == "It is late."


def test_reasoning_is_no_part_of_it(scripted):
    pieces = ("I hear", "</think>", "It is late.")
    server, _ = scripted(pieces, template="<think></think>", opens_reasoning=True, **EARS)
    assert server.client().audio.transcriptions.create(model="scripted", file=FILE).text == "It is late."


def test_a_model_without_ears(chat_server):
    with pytest.raises(openai.BadRequestError, match="accepts text only: this endpoint needs a model") as e:
        chat_server.client().audio.transcriptions.create(model="", file=FILE)
    assert e.value.param == "model" and e.value.code == "unsupported_model"


@pytest.mark.parametrize(
    "options, param, says",
    [
        ({"response_format": "srt"}, "response_format", "expected json or text: the model returns text without times"),
        ({"response_format": "verbose_json"}, "response_format", "expected json or text"),
        ({"response_format": "xml"}, "response_format", "response_format"),
        ({"temperature": 3}, "temperature", "temperature"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "without times"),
        ({"file": ("empty.wav", b"")}, "file", "it is empty"),
    ],
)
def test_what_is_refused(scripted, options, param, says):
    server, backend = scripted(**EARS)
    with pytest.raises(openai.BadRequestError, match=says) as error:
        server.client().audio.transcriptions.create(**{"model": "scripted", "file": FILE, **options})
    assert error.value.param == param and not backend.requests


def test_a_file_that_is_no_sound(server):
    with pytest.raises(openai.BadRequestError) as error:
        server.client().audio.transcriptions.create(model="", file=("x.wav", b"no sound at all"))
    assert error.value.param == "file"


def test_forms_without_a_file(scripted):
    server, _ = scripted(**EARS)
    for body, kind, says in (
        (b"{}", "application/json", "expected multipart/form-data"),
        (b"--x--", "multipart/form-data; boundary=x", "0 parts named file, expected one"),
    ):
        request = urllib.request.Request(f"{server.url}/v1/audio/transcriptions", body, {"content-type": kind})
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request)
        assert error.value.code == 400 and says in json.loads(error.value.read())["error"]["message"]


def test_the_sound_of_videos_is_asked_for(scripted):
    server, backend = scripted(**EARS)
    ask = {"model": "scripted", "messages": [{"role": "user", "content": "What?"}]}
    server.client().chat.completions.create(**ask, extra_body={"mm_processor_kwargs": {"use_audio_in_video": True}})
    assert backend.requests[0].use_audio_in_video is True
    with pytest.raises(openai.BadRequestError, match="mm_processor_kwargs"):
        server.client().chat.completions.create(**ask, extra_body={"mm_processor_kwargs": {"fps": 3}})


def test_a_request_error_names_the_file(scripted):
    server, backend = scripted(**EARS)
    backend.error = RequestError("audio 1: too long", param="file")
    with pytest.raises(openai.BadRequestError, match="too long"):
        server.client().audio.transcriptions.create(model="scripted", file=FILE)
