"""OpenAI's /v1/audio/speech: its body, the text as a spoken answer, and the sound file or the events."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from tilewright.outputs.sound import MAX_SPEED, MIN_SPEED, Tempo, encode
from tilewright.server.api import fields
from tilewright.server.api.bodies import Body, GenerationBody, null_means
from tilewright.server.api.chat import usage
from tilewright.server.http.errors import ApiError
from tilewright.server.link.backend import AUDIO_RATE, AnswerDelta, Ended, EngineRequest, ModelInfo, Started

MAX_INPUT_CHARACTERS = 4096  # OpenAI's limit: about five minutes


class VoiceId(Body):
    """A voice as an object, which OpenAI's interface allows in place of its name."""

    id: str


class SpeechBody(GenerationBody):
    """The body of /v1/audio/speech."""

    others = fields.SPEECH

    input: str = Field(min_length=1, max_length=MAX_INPUT_CHARACTERS, description="the text to speak")
    voice: str | VoiceId | None = Field(
        default=None, description="one of the model's voices or OpenAI's; default: the model's first"
    )
    response_format: Literal["mp3", "wav", "opus", "flac", "aac", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = Field(default="audio", description="sse: events, as the samples come")
    speed: Annotated[float, null_means(1.0)] = Field(
        default=1.0, ge=MIN_SPEED, le=MAX_SPEED, description="2: twice as fast, at the same pitch"
    )
    instructions: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, description="0: the likeliest codes")
    seed: int | None = None

    @model_validator(mode="after")
    def _is_stream(self) -> SpeechBody:
        self.stream = self.stream_format == "sse"
        return self

    @property
    def num_answers(self) -> int:
        return 1

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


def speech_request(body: SpeechBody, model: ModelInfo) -> EngineRequest:
    """Make the request of an answer that begins with the text. The model adds a last token, which is not spoken."""
    _check(body)
    sampling = {
        "max_tokens": 1,
        "voice": body.voice_name or model.voices[0],
        "temperature": body.temperature,
        "seed": body.seed,
    }
    return EngineRequest(
        messages=[{"role": "assistant", "content": body.input}],
        continue_final_message=True,
        sampling={name: value for name, value in sampling.items() if value is not None},
        names={"prompt": "input"},
    )


def _check(body: SpeechBody) -> None:
    if not body.input.strip():
        raise ApiError(400, "input has nothing but spaces, expected a text", param="input")
    if body.instructions:
        message = "instructions is given, which is not supported: the model's voices speak in one way each"
        raise ApiError(400, message, param="instructions", code="unsupported_parameter")
    if body.stream and body.response_format != "pcm":
        message = f"response_format is {body.response_format} with stream_format sse, expected pcm"
        raise ApiError(400, message, param="response_format")


_CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "aac": "audio/aac",
    "pcm": f"audio/pcm;rate={AUDIO_RATE}",
}


class SpeechWriter:
    """Writes the sound of an answer at the requested speed, without its text."""

    names_events = False
    has_sound = True

    def __init__(self, body: SpeechBody) -> None:
        self._format = body.response_format
        self._speed = body.speed
        # A whole file is stretched when it is encoded, in another thread.
        self._tempo = Tempo(AUDIO_RATE, body.speed) if body.stream else None
        self._pieces: list[bytes] = []
        self._ended: Ended | None = None

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        if isinstance(event, Ended):
            self._ended = event
        elif isinstance(event, AnswerDelta) and event.audio:
            if self._tempo is None:
                self._pieces.append(event.audio)
            else:
                yield from _deltas(self._tempo.add(event.audio))

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        assert self._ended is not None and self._tempo is not None
        yield from _deltas(self._tempo.finish())
        num_read = usage([self._ended])["prompt_tokens"]
        tokens = {"input_tokens": num_read, "output_tokens": 0, "total_tokens": num_read}
        yield {"type": "speech.audio.done", "usage": tokens}

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield error.body()

    def result(self) -> Response:
        tempo = Tempo(AUDIO_RATE, self._speed)
        samples = tempo.add(b"".join(self._pieces)) + tempo.finish()
        data = encode(samples, AUDIO_RATE, "pcm16" if self._format == "pcm" else self._format)
        return Response(data, media_type=_CONTENT_TYPES[self._format])


def _deltas(pcm16: bytes) -> Iterator[dict[str, Any]]:
    """Yield the event of some samples; nothing if there are none."""
    if pcm16:
        yield {"type": "speech.audio.delta", "audio": base64.b64encode(pcm16).decode()}
