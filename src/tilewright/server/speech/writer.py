"""Speech: from the engine's events to a sound file, or to OpenAI's events."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from tilewright.server.chat_completions import usage
from tilewright.server.errors import ApiError
from tilewright.server.link.backend import AUDIO_RATE, AnswerDelta, Ended, Started
from tilewright.server.speech.body import SpeechBody
from tilewright.sound_file import encode

_CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "pcm": f"audio/pcm;rate={AUDIO_RATE}",
}


class SpeechWriter:
    """Writes what is said, and nothing of the text."""

    names_events = False
    has_sound = True

    def __init__(self, body: SpeechBody) -> None:
        self._format = body.response_format
        self._pieces: list[bytes] = []
        self._ended: Ended | None = None

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        if isinstance(event, Ended):
            self._ended = event
        elif isinstance(event, AnswerDelta) and event.audio:
            self._pieces.append(event.audio)
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(event.audio).decode()}

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        assert self._ended is not None
        num_read = usage([self._ended])["prompt_tokens"]
        tokens = {"input_tokens": num_read, "output_tokens": 0, "total_tokens": num_read}
        yield {"type": "speech.audio.done", "usage": tokens}

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield error.body()

    def result(self) -> Response:
        data = encode(b"".join(self._pieces), AUDIO_RATE, "pcm16" if self._format == "pcm" else self._format)
        return Response(data, media_type=_CONTENT_TYPES[self._format])
