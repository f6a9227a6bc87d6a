"""Samples as the bytes of a sound file: what speaks writes them, in the formats of OpenAI's interface."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np

# By OpenAI's names: the container and the codec.
_ENCODERS = {
    "wav": ("wav", "pcm_s16le"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "flac": ("flac", "flac"),
}
FORMATS = (*_ENCODERS, "pcm16")


def to_pcm16(samples: np.ndarray) -> bytes:
    """fp32 samples in [-1, 1] as 16-bit little-endian ones."""
    return (samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes()


def encode(pcm16: bytes, rate: int, format: str) -> bytes:
    """A file of mono 16-bit samples, `rate` of them a second; "pcm16" are they themselves."""
    if format == "pcm16":
        return pcm16
    import av  # takes a while to load, and most answers are text

    container_format, codec = _ENCODERS[format]
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        if pcm16:
            samples = np.frombuffer(pcm16, "<i2")[None]
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "s16", "mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
