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
from tilewright.sound_file import Tempo, encode

_CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "aac": "audio/aac",
    "pcm": f"audio/pcm;rate={AUDIO_RATE}",
}


class SpeechWriter:
    """Writes what is said, at the speed asked for, and nothing of the text."""

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
    """The event of some samples, none where there are none."""
    if pcm16:
        yield {"type": "speech.audio.delta", "audio": base64.b64encode(pcm16).decode()}
