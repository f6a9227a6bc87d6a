"""Sound files are what was written: the same samples, or nearly those."""

import io

import av
import numpy as np
import pytest

from tilewright.sound_file import FORMATS, encode, to_pcm16

RATE = 24_000
TONE = (np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE) * 0.5).astype(np.float32)


def decoded(data):
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
        frames = [part for frame in container.decode(stream) for part in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "pcm16"])
def test_files_hold_the_sound(format):
    samples = decoded(encode(to_pcm16(TONE), RATE, format))
    if format in ("wav", "flac"):
        assert len(samples) == len(TONE) and np.abs(samples - TONE).max() < 1e-4
        return
    # Lossy ones add some padding, and are the tone all the same.
    assert abs(len(samples) - len(TONE)) < RATE // 8
    spectrum = np.abs(np.fft.rfft(samples[: RATE // 2]))
    assert abs(spectrum.argmax() * RATE / (RATE // 2) - 440) < 5


def test_pcm16_is_the_samples():
    assert encode(to_pcm16(TONE), RATE, "pcm16") == to_pcm16(TONE)
    assert np.frombuffer(to_pcm16(np.array([0, 1, -1, 2], np.float32)), "<i2").tolist() == [0, 32767, -32767, 32767]


@pytest.mark.parametrize("format", FORMATS)
def test_silence_is_a_file_too(format):
    assert isinstance(encode(b"", RATE, format), bytes)
