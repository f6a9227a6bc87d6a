"""The body of a request for speech."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tilewright.server import fields
from tilewright.server.bodies import Body, GenerationBody, null_means
from tilewright.sound_file import MAX_SPEED, MIN_SPEED

MAX_INPUT_CHARACTERS = 4096  # OpenAI's limit: some five minutes


class VoiceId(Body):
    id: str


class SpeechBody(GenerationBody):
    others = fields.SPEECH

    input: str = Field(min_length=1, max_length=MAX_INPUT_CHARACTERS, description="what is said")
    voice: str | VoiceId | None = Field(
        default=None, description="one of the model's voices, or OpenAI's name for one; its first if left out"
    )
    response_format: Literal["mp3", "wav", "opus", "flac", "aac", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = Field(default="audio", description="sse: events, as the samples come")
    speed: Annotated[float, null_means(1.0)] = Field(
        default=1.0, ge=MIN_SPEED, le=MAX_SPEED, description="how many times as fast, at the same pitch"
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
