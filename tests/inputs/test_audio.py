import io

import av
import numpy as np
import pytest
import torch
from clips import damages, write_clip
from sounds import read_wav, wav, write_sound

from tilewright.inputs.audio import open_sound
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.types import RequestError


def opened(source, rate=16000, **limits):
    return open_sound(MediaPart("audio", "audio 1", source), MediaLimits(**limits), rate)


def tone(num_samples, rate, hertz=440.0, channels=1):
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(num_samples) / rate)
    return wave[:, None] * np.linspace(1, 0.25, channels)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 8, 17])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_is_as_the_standard_library_reads_it(width, channels):
    noise = np.random.default_rng(0).uniform(-1, 1, (3001, channels))
    data = wav(noise, 16000, width)
    sound = opened(data)
    assert sound.duration_s == pytest.approx(3001 / 16000) and sound.sample_rate == 16000
    samples = sound.decode()
    assert samples.dtype == np.float32 and samples.shape == (3001,)
    expected = read_wav(data).mean(axis=1, dtype=np.float32)
    assert np.allclose(samples, expected, rtol=0, atol=1e-7)
    assert channels > 1 or np.array_equal(samples, expected)


@pytest.mark.parametrize("rate", [8000, 16000, 24000, 48000])
def test_rates(rate):
    """A tone stays the same tone, as long and as loud."""
    samples = opened(wav(tone(22050, 22050), 22050), rate).decode()
    assert abs(len(samples) - rate) <= 1
    inner = slice(rate // 10, -rate // 10)
    expected = tone(len(samples), rate)[:, 0]
    assert np.abs(samples - expected)[inner].max() < 2e-3


CODECS = {"flac": "flac", "mp3": "libmp3lame", "m4a": "aac", "ogg": "libopus", "webm": "libopus", "mka": "pcm_s16le"}


@pytest.mark.parametrize("suffix", CODECS)
def test_formats(suffix, tmp_path):
    """Within what the codec loses; those that lose something may also add silence in front."""
    source = tone(48000, 48000, channels=2)
    path = tmp_path / f"a.{suffix}"
    data = write_sound(path, source, 48000, CODECS[suffix])
    sound = opened(data, 48000)
    samples = sound.decode()
    assert sound.duration_s == pytest.approx(1, abs=0.1) and abs(len(samples) - 48000) < 4800
    assert sound.digest == opened(path, 48000).digest == opened(str(path), 48000).digest
    mono = source.mean(axis=1)
    if suffix in ("flac", "mka"):
        assert np.abs(samples - mono).max() < 1e-4
        return
    delay = max(range(2000), key=lambda lag: samples[8000 + lag : 12000 + lag] @ mono[8000:12000])
    error = samples[8000 + delay : 40000 + delay] - mono[8000:40000]
    assert np.sqrt(np.mean(error**2)) < 0.05


def test_sound_of_a_video(tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        video, audio = container.add_stream("mpeg4", rate=25), container.add_stream("aac", rate=16000, layout="mono")
        video.height, video.width, video.pix_fmt = 48, 64, "yuv420p"
        container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        frame = av.AudioFrame.from_ndarray(tone(8000, 16000).T.astype(np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        for stream, last in ((audio, frame), (audio, None), (video, None)):
            container.mux(stream.encode(last))
    assert len(opened(path).decode()) == pytest.approx(8000, abs=2100)


def test_arrays():
    samples = tone(800, 16000)[:, 0]
    for source in (samples, samples.astype(np.float32), torch.from_numpy(samples)):
        sound = opened(source)
        assert np.array_equal(sound.decode(), samples.astype(np.float32)) and sound.duration_s == 0.05
    assert opened(samples).digest != opened(samples * 0.5).digest


@pytest.mark.parametrize(
    "source,message",
    [
        (b"no sound at all, just some text", "audio 1: cannot be decoded: "),
        (b"", "audio 1: it is empty"),
        ("no/such/file.wav", "audio 1: no/such/file.wav cannot be read"),
        (3, "audio 1: it is a int, expected bytes, a path, an array of samples or "),
        (np.zeros((5, 2)), r"audio 1: it is an array of float64 \[5, 2\], expected floats \[samples\], mono"),
        (np.zeros(5, np.int16), r"audio 1: it is an array of int16 \[5\]"),
        (np.zeros(0), r"audio 1: it is an array of float64 \[0\]"),
        (np.array([0.0, np.nan]), "audio 1: some samples are not finite"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_sound(source, message):
    with pytest.raises(RequestError, match=message):
        opened(source)


def test_a_file_without_sound(tmp_path):
    with pytest.raises(RequestError, match="audio 1: the file has no sound"):
        opened(write_clip(tmp_path / "a.mp4", 3))


@pytest.mark.parametrize("kind", ["hls", "concat"])
def test_playlists_open_nothing(kind, tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(tone(800, 8000), 8000))
    playlist = {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile {path}\n",
    }[kind]
    with pytest.raises(RequestError, match="audio 1: cannot be decoded"):
        opened(playlist.encode())


def test_limits():
    data = wav(tone(16000, 8000), 8000)
    with pytest.raises(RequestError, match=r"audio 1: 2\.0 seconds, the limit is 1"):
        opened(data, max_duration_s=1)
    with pytest.raises(RequestError, match=r"audio 1: 2\.0 seconds, the limit is 1"):
        opened(np.zeros(32000), max_duration_s=1)
    with pytest.raises(RequestError, match=r"audio 1: .* bytes or more, the limit is 1000"):
        opened(data, max_bytes=1000)


@pytest.mark.parametrize(
    "channels,rate,message",
    [
        (1, 999, "audio 1: 999 samples a second, expected 1000 to 768000"),
        (1, 2**31 - 1, "audio 1: 2147483647 samples a second"),
        (65, 8000, "audio 1: .*(65 channels|cannot be decoded)"),
    ],
)
def test_rates_and_channels_that_no_sound_has(channels, rate, message):
    """The resampler would build tables of gigabytes for some."""
    data = bytearray(wav(np.zeros((800, channels)), 8000))
    data[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(RequestError, match=message):
        opened(bytes(data)).decode()


def test_a_file_that_is_cut_short_plays_what_is_there():
    """As players do: a WAV that is still being written says the wrong length."""
    data = wav(tone(16000, 16000), 16000)
    assert len(opened(data[: len(data) // 2]).decode()) == pytest.approx(8000, abs=50)


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "m4a", "ogg"])
def test_any_damage_is_a_clear_error_or_none(suffix, tmp_path):
    source = tone(4000, 16000, channels=2)
    if suffix == "wav":
        data = wav(source, 16000)
    else:
        data = write_sound(tmp_path / f"a.{suffix}", source, 48000 if suffix == "ogg" else 16000, CODECS[suffix])
    outcomes = set()
    for damaged in damages(data, 100):
        try:
            samples = opened(damaged, max_duration_s=60).decode()
            assert samples.ndim == 1 and len(samples)
            outcomes.add("decoded")
        except RequestError as error:
            assert str(error).startswith("audio 1: ")
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}


def test_titles_in_old_encodings_are_no_reason_to_refuse():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as container:
        container.metadata["title"] = "Kaefer"
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = buffer.getvalue()
    assert b"Kaefer" in data
    assert len(opened(data.replace(b"Kaefer", b"K\xe4fer\0"), 8000).decode()) == 800


def test_an_array_with_its_rate():
    """As loud and as long as at the rate wanted; another rate is another sound."""
    given = tone(44_100, 44_100)[:, 0].astype(np.float32)
    sound = opened((given, 44_100))
    samples = sound.decode()
    assert sound.duration_s == 1.0 and abs(len(samples) - 16_000) <= 20
    inner = slice(1_600, 14_400)
    assert np.abs(samples[inner] - tone(len(samples), 16_000)[inner, 0]).max() < 2e-3
    same = opened((given, 16_000))
    assert np.array_equal(same.decode(), given) and same.digest == opened(given).digest != sound.digest
    with pytest.raises(RequestError, match="10 samples a second, expected 1000"):
        opened((given, 10))
