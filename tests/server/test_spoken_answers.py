"""Answers with sound over HTTP: in one piece as a file, in a stream as samples."""

import base64
import io
import json
import wave

import av
import httpx
import openai
import pytest
from conftest import serving
from speaking_backend import PIECES, SAMPLES, SpeakingBackend

from tilewright.outputs.sound import encode
from tilewright.server.link.backend import AUDIO_RATE


@pytest.fixture(scope="module")
def backend():
    return SpeakingBackend()


@pytest.fixture(scope="module")
def url(backend):
    with serving(lambda: backend) as running:
        yield running.url


def asked(url, **more):
    body = {"messages": [{"role": "user", "content": "Hi"}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def spoken(**audio):
    return {"modalities": ["text", "audio"], "audio": audio}


def test_the_whole_is_a_wav_file(url, backend):
    (choice,) = asked(url, **spoken(voice="bob", format="wav")).json()["choices"]
    assert backend.requests[-1].sampling["voice"] == "bob"
    message = choice["message"]
    assert message["content"] == message["audio"]["transcript"] == "Hello" and choice["finish_reason"] == "stop"
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (AUDIO_RATE, 1, 2)
        assert file.readframes(file.getnframes()) == SAMPLES.tobytes()


@pytest.mark.parametrize("format", ["mp3", "opus", "flac", "aac"])
def test_other_formats(url, format):
    message = asked(url, **spoken(format=format)).json()["choices"][0]["message"]
    with av.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as container:
        num_samples = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0)) * AUDIO_RATE
    assert abs(num_samples - len(SAMPLES)) < AUDIO_RATE / 8


@pytest.mark.parametrize("path", ["chat/completions", "audio/speech"])
def test_the_server_answers_others_while_sound_is_encoded(url, path, monkeypatch):
    """The encoder asks the server itself: on the server's event loop it would wait for its own end."""
    seen = []

    def asking(*args):
        seen.append(httpx.get(f"{url}/v1/models", timeout=20).status_code)
        return encode(*args)

    for module in ("chat", "speech"):
        monkeypatch.setattr(f"tilewright.server.api.{module}.encode", asking)
    made = asked(url, **spoken(format="mp3")) if path == "chat/completions" else read_out(url)
    assert made.status_code == 200 and seen == [200]


def test_a_stream_has_samples_as_they_come(url, backend):
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "stream": True, "modalities": ["text", "audio"]},
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert backend.requests[-1].sampling["voice"] == "ann"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    sounds = [delta["audio"] for delta in deltas if "audio" in delta]
    assert [base64.b64decode(sound["data"]) for sound in sounds] == PIECES
    assert len({sound["id"] for sound in sounds}) == 1
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    kinds = ["audio" if "audio" in delta else "content" for delta in deltas if delta.get("content") or "audio" in delta]
    assert kinds[:4] == ["content", "audio", "content", "audio"]


def test_text_alone_has_no_sound(url, backend):
    message = asked(url, modalities=["text"]).json()["choices"][0]["message"]
    assert "audio" not in message and "voice" not in backend.requests[-1].sampling


def test_models_that_speak_list_their_voices(url):
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["output_modalities"] == ["text", "audio"] and model["voices"] == ["ann", "bob"]
    assert model["voice_aliases"] == {"alloy": "ann", "ash": "bob"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"modalities": ["audio"]}, "expected text, or text and audio"),
        ({"audio": {"voice": "ann"}}, "expected modalities with audio"),
        (spoken(format="amr"), "format"),
        ({**spoken(format="mp3"), "stream": True}, "expected pcm16"),
    ],
)
def test_what_is_refused(url, more, named):
    response = asked(url, **more)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


def test_a_model_that_does_not_speak(scripted):
    running, _ = scripted()
    response = asked(running.url, **spoken())
    assert response.status_code == 400 and "scripted does not speak" in response.json()["error"]["message"]


def read_out(url, **body):
    return httpx.post(f"{url}/v1/audio/speech", json={"input": "Good day.", **body}, timeout=30)


def test_a_text_is_read_out(url, backend):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    made = client.audio.speech.create(model="", voice="bob", input="Good day.", response_format="wav")
    with wave.open(io.BytesIO(made.content)) as file:
        assert file.readframes(file.getnframes()) == SAMPLES.tobytes()
    request = backend.requests[-1]
    assert request.messages == [{"role": "assistant", "content": "Good day."}]
    assert request.continue_final_message and not request.template_arguments
    assert request.sampling == {"max_tokens": 1, "voice": "bob"}


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        (None, "audio/mpeg"),
        ("opus", "audio/ogg"),
        ("flac", "audio/flac"),
        ("aac", "audio/aac"),
        ("pcm", "audio/pcm"),
    ],
)
def test_formats_of_what_is_read_out(url, backend, format, kind):
    made = read_out(url, temperature=0, seed=3, **({"response_format": format} if format else {}))
    assert made.headers["content-type"].startswith(kind)
    assert backend.requests[-1].sampling == {"max_tokens": 1, "voice": "ann", "temperature": 0.0, "seed": 3}
    if format == "pcm":
        assert made.content == SAMPLES.tobytes()
    else:
        with av.open(io.BytesIO(made.content)) as container:
            assert container.streams.audio[0].rate


def test_what_is_read_out_comes_in_events(url):
    lines = read_out(url, response_format="pcm", stream_format="sse").text.splitlines()
    *deltas, done = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [base64.b64decode(delta["audio"]) for delta in deltas] == PIECES
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert done == {
        "type": "speech.audio.done", "usage": {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3}
    }  # fmt: skip


def test_a_text_is_read_out_at_another_speed(url):
    """In every format, and in events as in one piece."""
    lines = read_out(url, response_format="pcm", stream_format="sse", speed=0.5).text.splitlines()
    *deltas, done = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert done["type"] == "speech.audio.done" and len(deltas) > 1
    assert streamed == read_out(url, response_format="pcm", speed=0.5).content
    assert abs(len(streamed) // 2 - 2 * len(SAMPLES)) < AUDIO_RATE / 20
    for format in ("mp3", "wav", "opus", "flac", "aac"):
        made = read_out(url, response_format=format, speed=2)
        with av.open(io.BytesIO(made.content)) as container:
            seconds = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
        assert abs(seconds - len(SAMPLES) / AUDIO_RATE / 2) < 1 / 8, format


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": ""}, "input"),
        ({"input": "  "}, "input"),
        ({"input": "a" * 4097}, "input"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.5}, "speed"),
        ({"instructions": "whisper"}, "instructions"),
        ({"response_format": "amr"}, "response_format"),
        ({"stream_format": "sse"}, "response_format"),
    ],
)
def test_what_cannot_be_read_out(url, body, named):
    refused = read_out(url, **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == named


def test_models_without_a_voice_read_nothing_out(scripted):
    refused = read_out(scripted(("Hi",))[0].url)
    assert refused.status_code == 400 and "does not speak" in refused.json()["error"]["message"]
