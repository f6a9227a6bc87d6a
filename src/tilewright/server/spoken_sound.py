"""The sound of one spoken answer, as OpenAI's objects have it."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

from tilewright.server.link.backend import AUDIO_RATE
from tilewright.sound_file import encode


class SpokenSound:
    """Samples as they come; `format` is that of the whole."""

    def __init__(self, format: str) -> None:
        self._format = format
        self._id = f"audio_{uuid.uuid4().hex}"
        self._pieces: list[bytes] = []

    def add(self, pcm16: bytes) -> dict[str, Any]:
        """What a chunk of a stream has of it."""
        self._pieces.append(pcm16)
        return {"id": self._id, "data": base64.b64encode(pcm16).decode()}

    def result(self, *, transcript: str) -> dict[str, Any]:
        """The whole; it is not stored, so that it expires at once."""
        data = encode(b"".join(self._pieces), AUDIO_RATE, self._format)
        return {
            "id": self._id,
            "data": base64.b64encode(data).decode(),
            "expires_at": int(time.time()),
            "transcript": transcript,
        }
