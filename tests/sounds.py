"""Small sounds, made for the tests."""

import io
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def wav(samples: np.ndarray, rate: int, width: int = 2) -> bytes:
    """A WAV file of floats [N, channels], as whole numbers of `width` bytes."""
    levels = np.rint(np.clip(samples, -1, 1) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    if width == 1:
        data = (levels + 128).astype(np.uint8).tobytes()
    else:
        data = np.ascontiguousarray(levels)[..., None].view(np.uint8)[..., :width].tobytes()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return buffer.getvalue()


def read_wav(data: bytes) -> np.ndarray:
    """Its samples as floats [N, channels], by the standard library alone."""
    with wave.open(io.BytesIO(data)) as file:
        width, raw = file.getsampwidth(), file.readframes(file.getnframes())
        levels = np.frombuffer(raw, np.uint8).reshape(-1, file.getnchannels(), width)
    if width == 1:
        return ((levels[..., 0].astype(np.int32) - 128) / 128).astype(np.float32)
    wide = np.zeros((*levels.shape[:2], 4), np.uint8)
    wide[..., 4 - width :] = levels
    return (wide.view("<i4")[..., 0] / 2.0**31).astype(np.float32)


def write_sound(path: Path, samples: np.ndarray, rate: int, codec: str) -> bytes:
    """Encodes floats [N, channels] and returns the file's bytes."""
    layout = {1: "mono", 2: "stereo"}[samples.shape[1]]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T, dtype=np.float32), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path.read_bytes()
