"""Reads sounds: finds the duration of a file without decoding it, and decodes the samples on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.inputs.media import MediaLimits, MediaPart, check_duration, read_source
from tilewright.inputs.video import opened_container
from tilewright.types import RequestError

if TYPE_CHECKING:
    import av

_CONTAINERS = "wav,mp3,flac,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"
# The resampler's table grows with the ratio of the rates: a file that claims 2 GHz would ask for gigabytes.
_MIN_RATE, _MAX_RATE = 1_000, 768_000
_MAX_CHANNELS = 64
# Seconds that a file may play beyond the duration of its packets: the last packet of some is padded.
_MAX_EXTRA_S = 1.0


@dataclass(frozen=True)
class OpenedSound:
    """A sound of known duration. `decode` returns mono float32 [samples] in [-1, 1], `sample_rate` per second.

    `open_sound` makes it of a MediaPart; a processor makes a PreparedMedium of it.
    """

    name: str
    duration_s: float
    sample_rate: int
    decode: Callable[[], np.ndarray]
    digest: bytes = b""  # of the file, or of the samples; empty in a decoder process


# (encoded bytes, item's name for errors, limits, wanted sample rate) -> OpenedSound
ReadSound = Callable[[bytes, str, MediaLimits, int], OpenedSound]


def read_sound(data: bytes, name: str, limits: MediaLimits, sample_rate: int) -> OpenedSound:
    """Return the sound in the bytes, without a digest; its samples are decoded on demand, in this process."""
    with _opened(data, name) as (container, stream):
        if stream.duration is not None and stream.time_base is not None:
            check_duration(float(stream.duration * stream.time_base), name, limits)
        duration_s = _duration(container, stream)
    check_duration(duration_s, name, limits)
    return OpenedSound(name, duration_s, sample_rate, lambda: _decode(data, name, duration_s, sample_rate))


def open_sound(part: MediaPart, limits: MediaLimits, sample_rate: int, read: ReadSound = read_sound) -> OpenedSound:
    """Return the sound of a part: bytes, a file, an array of floats at the wanted rate, or (array, its rate).

    `read` reads encoded sounds.
    """
    source = read_source(part, limits)
    if isinstance(source, bytes):
        digest = hashlib.blake2b(source, digest_size=32).digest()
        return replace(read(source, part.name, limits, sample_rate), digest=digest)
    rate = sample_rate
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], int):
        source, rate = source
        _check_form(rate, 1, part.name)
    if hasattr(source, "__array__"):
        samples = _as_samples(source, part.name)
        duration_s = len(samples) / rate
        check_duration(duration_s, part.name, limits)
        digest = hashlib.blake2b(
            samples.data, digest_size=32, key=b"" if rate == sample_rate else b"%d" % rate
        ).digest()
        return OpenedSound(
            part.name, duration_s, sample_rate, lambda: _resampled(samples, rate, duration_s, sample_rate), digest
        )
    expected = "bytes, a path, an array of samples or (array, samples a second)"
    raise RequestError(f"{part.name}: it is a {type(source).__name__}, expected {expected}")


def _resampled(samples: np.ndarray, rate: int, duration_s: float, sample_rate: int) -> np.ndarray:
    import av

    if rate == sample_rate:
        return samples
    frame = av.AudioFrame.from_ndarray(samples[None], "flt", "mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sample_rate)
    blocks = [out.to_ndarray()[0] for part in (frame, None) for out in resampler.resample(part)]
    return np.concatenate(blocks)[: max_samples(duration_s, sample_rate)]


def max_samples(duration_s: float, sample_rate: int) -> int:
    """Return the largest number of samples that a file of this duration may have."""
    return int((duration_s + _MAX_EXTRA_S) * sample_rate)


def _as_samples(source: Any, name: str) -> np.ndarray:
    samples = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    if samples.ndim != 1 or not len(samples) or not np.issubdtype(samples.dtype, np.floating):
        shape = f"{samples.dtype} {list(samples.shape)}"
        raise RequestError(f"{name}: it is an array of {shape}, expected floats [samples], mono")
    if not np.isfinite(samples).all():
        raise RequestError(f"{name}: some samples are not finite")
    return np.ascontiguousarray(samples, dtype=np.float32)


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[tuple[Any, Any]]:
    with opened_container(data, name, _CONTAINERS) as container:
        if not container.streams.audio:
            raise RequestError(f"{name}: the file has no sound")
        stream = container.streams.audio[0]
        context = stream.codec_context
        if context is None:
            raise RequestError(f"{name}: cannot be decoded: there is no decoder for its kind of sound")
        _check_form(context.sample_rate, context.layout.nb_channels, name)
        context.thread_count = 1
        yield container, stream


def _check_form(sample_rate: int, num_channels: int, name: str) -> None:
    if not _MIN_RATE <= sample_rate <= _MAX_RATE:
        raise RequestError(f"{name}: {sample_rate} samples a second, expected {_MIN_RATE} to {_MAX_RATE}")
    if not 1 <= num_channels <= _MAX_CHANNELS:
        raise RequestError(f"{name}: {num_channels} channels, expected 1 to {_MAX_CHANNELS}")


def _duration(container: Any, stream: Any) -> float:
    """Return the seconds from the first packet's start to the last one's end, or the sum of durations if larger."""
    first, last, total = None, 0, 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        total += packet.duration or 0
        if packet.pts is not None:
            first = packet.pts if first is None else min(first, packet.pts)
            last = max(last, packet.pts + (packet.duration or 0))
    span = last - first if first is not None else 0
    return float(max(span, total) * (stream.time_base or 0))


def _decode(data: bytes, name: str, duration_s: float, sample_rate: int) -> np.ndarray:
    """Return mono float32 samples at the wanted rate: the mean of the channels."""
    import av

    with _opened(data, name) as (container, stream):
        # Packed: PyAV reads past the end of a list of planes once there are 8 of them.
        to_floats = av.AudioResampler(format="flt")
        to_rate = av.AudioResampler(format="flt", layout="mono", rate=sample_rate)
        most, blocks, num_samples = max_samples(duration_s, sample_rate), [], 0
        for mono in _mono_frames(container, stream, to_floats, name):
            for frame in to_rate.resample(mono):
                blocks.append(frame.to_ndarray()[0])
                num_samples += len(blocks[-1])
            if mono is not None and num_samples > most:
                raise RequestError(f"{name}: it plays longer than the {duration_s:.1f} seconds that it declares")
    if not num_samples:
        raise RequestError(f"{name}: nothing of it can be decoded")
    return np.concatenate(blocks)[:most]


def _mono_frames(
    container: Any, stream: Any, to_floats: av.AudioResampler, name: str
) -> Iterator[av.AudioFrame | None]:
    """Yield the frames with their channels averaged, then None, which flushes a resampler.

    FFmpeg's own conversion to mono adds float channels without dividing.
    """
    import av

    for coded in container.decode(stream):
        _check_form(coded.sample_rate, coded.layout.nb_channels, name)
        for frame in to_floats.resample(coded):
            samples = frame.to_ndarray().reshape(-1, frame.layout.nb_channels).mean(axis=1, dtype=np.float32)
            mono = av.AudioFrame.from_ndarray(samples[None], "flt", "mono")
            mono.sample_rate, mono.pts, mono.time_base = frame.sample_rate, frame.pts, frame.time_base
            yield mono
    yield None
