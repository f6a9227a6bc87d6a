"""Sound files are what was written: the same samples, or nearly those."""

import io

import av
import numpy as np
import pytest

from tilewright.outputs.sound import FORMATS, Tempo, encode, to_pcm16

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
    assert 0 <= len(samples) - len(TONE) < (2 * 1024 if format == "aac" else RATE // 8)  # two frames of aac
    assert abs(pitch(samples) - 440) < 5


def pitch(samples):
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return spectrum.argmax() * RATE / len(samples)


@pytest.mark.parametrize("speed", [0.25, 0.6, 1, 1.5, 4])
def test_another_speed_keeps_the_pitch(speed):
    pcm16 = to_pcm16(TONE)
    tempo = Tempo(RATE, speed)
    whole = tempo.add(pcm16) + tempo.finish()
    samples = np.frombuffer(whole, "<i2")
    assert abs(len(samples) - RATE / speed) < RATE / 15
    assert abs(pitch(samples) - 440) < 3
    assert abs(samples.std() / np.frombuffer(pcm16, "<i2").std() - 1) < 0.01  # it goes on without gaps
    pieces = Tempo(RATE, speed)
    streamed = [pieces.add(pcm16[start : start + 1994]) for start in range(0, len(pcm16), 1994)]
    assert b"".join(streamed) + pieces.finish() == whole
    assert sum(len(piece) > 0 for piece in streamed) > 3  # and comes before the end


@pytest.mark.parametrize("speed", [0.25, 4])
def test_nothing_has_no_speed(speed):
    tempo = Tempo(RATE, speed)
    assert tempo.add(b"") + tempo.finish() == b""


def test_pcm16_is_the_samples():
    assert encode(to_pcm16(TONE), RATE, "pcm16") == to_pcm16(TONE)
    assert np.frombuffer(to_pcm16(np.array([0, 1, -1, 2], np.float32)), "<i2").tolist() == [0, 32767, -32767, 32767]


@pytest.mark.parametrize("format", FORMATS)
def test_silence_is_a_file_too(format):
    assert isinstance(encode(b"", RATE, format), bytes)
