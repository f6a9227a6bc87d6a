"""Encodes samples as a sound file, in the formats of OpenAI's interface, and changes the speed of speech."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from typing import Any

import numpy as np

# OpenAI's name -> container and codec.
_ENCODERS = {
    "wav": ("wav", "pcm_s16le"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "flac": ("flac", "flac"),
    "aac": ("adts", "aac"),
}
FILE_FORMATS = tuple(_ENCODERS)
FORMATS = (*FILE_FORMATS, "pcm16")
MIN_SPEED, MAX_SPEED = 0.25, 4.0  # OpenAI's limits
# Beyond this factor the filter `atempo` repeats or drops parts of the sound; several filters in a row do not.
_MAX_STRETCH = 2.0


def to_pcm16(samples: np.ndarray) -> bytes:
    """Return fp32 samples in [-1, 1] as 16-bit little-endian bytes."""
    return (samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes()


def encode(pcm16: bytes, rate: int, format: str) -> bytes:
    """Return a file of mono 16-bit samples, `rate` per second; for "pcm16" the samples themselves."""
    if format == "pcm16":
        return pcm16
    import av  # slow to load, and most answers are text

    container_format, codec = _ENCODERS[format]
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        if pcm16:
            container.mux(stream.encode(_frame(pcm16, rate, 0)))
        container.mux(stream.encode(None))
    return file.getvalue()


class Tempo:
    """Speeds up or slows down mono 16-bit samples as they arrive, and keeps their pitch.

    The joined results of `add` and `finish` do not depend on how the sound was cut into pieces.
    """

    def __init__(self, rate: int, speed: float) -> None:
        """`speed` is the factor, MIN_SPEED to MAX_SPEED."""
        import av

        self._rate = rate
        self._num_samples = 0  # so far
        self._graph = None if speed == 1 else av.filter.Graph()
        if self._graph is None:
            return
        num_filters = math.ceil(round(abs(math.log(speed, _MAX_STRETCH)), 6)) or 1
        source = self._graph.add_abuffer(sample_rate=rate, format="s16", layout="mono", time_base=Fraction(1, rate))
        filters = [self._graph.add("atempo", f"{speed ** (1 / num_filters):.9f}") for _ in range(num_filters)]
        self._graph.link_nodes(source, *filters, self._graph.add("abuffersink")).configure()

    def add(self, pcm16: bytes) -> bytes:
        """Append samples; return those that are ready. The filter holds back some hundredths of a second."""
        if self._graph is None or not pcm16:
            return pcm16
        self._graph.push(_frame(pcm16, self._rate, self._num_samples))
        self._num_samples += len(pcm16) // 2
        return self._filtered()

    def finish(self) -> bytes:
        """End the sound; return the remaining samples."""
        if self._graph is None or not self._num_samples:
            return b""
        self._graph.push(None)
        return self._filtered()

    def _filtered(self) -> bytes:
        from av.error import BlockingIOError, EOFError

        assert self._graph is not None
        pieces: list[bytes] = []
        while True:
            try:
                frame: Any = self._graph.pull()
            except (BlockingIOError, EOFError):
                return b"".join(pieces)
            pieces.append(frame.to_ndarray().astype("<i2").tobytes())


def _frame(pcm16: bytes, rate: int, first_sample: int) -> Any:
    import av

    frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm16, "<i2").astype(np.int16)[None], "s16", "mono")
    frame.sample_rate, frame.pts, frame.time_base = rate, first_sample, Fraction(1, rate)
    return frame
