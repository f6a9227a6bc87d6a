"""A scripted backend that speaks."""

import asyncio
import dataclasses

import numpy as np
from conftest import ScriptedBackend

from tilewright.server.link.backend import AUDIO_RATE, AnswerDelta, Ended, Started
from tilewright.types import Timings

SAMPLES = (np.sin(np.arange(AUDIO_RATE // 2) / 10) * 9000).astype("<i2")
ALIASES = {"alloy": "ann", "ash": "bob"}
PIECES = [part.tobytes() for part in np.split(SAMPLES, 4)]


class SpeakingBackend(ScriptedBackend):
    """Says the same samples after each piece of text; the last come when the text is complete."""

    def __init__(self, **model):
        super().__init__()
        self.model = dataclasses.replace(self.model, voices=("ann", "bob"), voice_aliases=ALIASES, **model)

    def submit(self, request, listener):
        self.requests.append(request)
        is_spoken = "voice" in request.sampling
        events = [Started(3, False)]
        for text, samples in zip(("Hel", "lo", "", ""), PIECES, strict=True):
            events += [AnswerDelta(0, text, 1)] if text else []
            events += [AnswerDelta(0, "", 0, audio=samples)] if is_spoken else []
        events += [AnswerDelta(0, "", 0, "stop"), Ended(3, 0, 2, Timings(0.0, 0.1, 0.2))]
        for event in events:
            asyncio.get_running_loop().call_soon(listener, event)
        return lambda: None
