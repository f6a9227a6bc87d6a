"""Videos to frames: what a file holds is found without decoding, then only what the sampled frames need is decoded."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.inputs.image import array_to_rgb, open_picture
from tilewright.inputs.media import Fetch, Limits, MediaPart, check_pixels, read_source
from tilewright.types import RequestError

if TYPE_CHECKING:
    import av

# For frames that come without a rate; what the models' own processors take.
DEFAULT_FPS = 24.0
# Containers that hold their frames themselves. FFmpeg also reads playlists: those name other files and addresses, which
# it would open.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg,asf"
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
# Frames further than this from an even rate go by their own times: models read times to a tenth of a second. A frame
# dropped here and there leaves the rate even.
_MAX_JITTER_S = 0.1
# How much longer than its frames a file may say it is: some round up.
_MAX_MISSING_END_S = 0.5


@dataclass(frozen=True)
class Sampled:
    """Which frames, and when they are shown."""

    indices: tuple[int, ...]
    times_s: tuple[float, ...]


@dataclass(frozen=True)
class Video:
    """A video whose size and frames are known. `frames` gives [height, width, 3] uint8 for each of rising indices."""

    name: str
    num_frames: int
    fps: float
    height: int
    width: int
    digest: bytes
    frames: Callable[[Sequence[int]], Iterator[np.ndarray]]
    times_s: tuple[float, ...] | None = None  # of every frame, where the rate varies

    def sample(self, indices: Sequence[int]) -> Sampled:
        """The frames nearest to the times that evenly spread indices stand for."""
        if self.times_s is None:
            return Sampled(tuple(indices), tuple(index / self.fps for index in indices))
        times = np.asarray(self.times_s)
        last = max(self.num_frames - 1, 1)
        wanted = times[0] + np.asarray(indices) / last * (times[-1] - times[0])
        after = np.clip(np.searchsorted(times, wanted), 1, last) if self.num_frames > 1 else np.zeros(1, dtype=int)
        nearest = np.where(wanted - times[after - 1] <= times[after] - wanted, after - 1, after)
        return Sampled(tuple(nearest.tolist()), tuple((times[nearest] - times[0]).tolist()))


def open_video(part: MediaPart, limits: Limits, fetch: Fetch | None = None) -> Video:
    """The video of a part: bytes, a file, an array [F, H, W, 3], or a list of pictures."""
    if isinstance(part.source, list | tuple):
        return _from_pictures(part, limits, fetch)
    source = read_source(part, limits, fetch)
    if isinstance(source, bytes):
        return _from_bytes(source, part.name, limits)
    if hasattr(source, "__array__"):
        return _from_array(source, part, limits)
    expected = "bytes, a path, an array of frames or a list of pictures"
    raise RequestError(f"{part.name}: it is a {type(source).__name__}, expected {expected}")


def _from_array(source: Any, part: MediaPart, limits: Limits) -> Video:
    array = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    if array.ndim != 4 or 0 in array.shape:
        raise RequestError(f"{part.name}: its shape is {list(array.shape)}, expected [frames, H, W, 3]")
    pixels = array_to_rgb(array, part.name)
    num_frames, height, width = pixels.shape[:3]
    check_pixels(height, width, part.name, limits)
    fps = part.fps or DEFAULT_FPS
    _check_duration(num_frames / fps, part.name, limits)
    digest = hashlib.blake2b(repr((pixels.shape, fps)).encode(), digest_size=32)
    digest.update(pixels.data)
    return Video(
        part.name, num_frames, fps, height, width, digest.digest(), lambda indices: (pixels[index] for index in indices)
    )


def _from_pictures(part: MediaPart, limits: Limits, fetch: Fetch | None) -> Video:
    if not part.source:
        raise RequestError(f"{part.name}: it has no frames")
    fps = part.fps or DEFAULT_FPS
    _check_duration(len(part.source) / fps, part.name, limits)
    pictures = [
        open_picture(MediaPart("image", f"{part.name}, frame {index + 1}", frame), limits, fetch)
        for index, frame in enumerate(part.source)
    ]
    first = pictures[0]
    for picture in pictures:
        if (picture.height, picture.width) != (first.height, first.width):
            size, expected = f"{picture.width} x {picture.height}", f"{first.width} x {first.height}"
            raise RequestError(f"{picture.name}: {size}, the first frame is {expected}")
    digest = hashlib.blake2b(b"".join(picture.digest for picture in pictures) + repr(fps).encode(), digest_size=32)
    return Video(
        part.name,
        len(pictures),
        fps,
        first.height,
        first.width,
        digest.digest(),
        lambda indices: (pictures[index].decode() for index in indices),
    )


def _check_duration(duration_s: float, name: str, limits: Limits) -> None:
    if duration_s > limits.max_duration_s:
        raise RequestError(f"{name}: {duration_s:.1f} seconds, the limit is {limits.max_duration_s:g}")


@dataclass(frozen=True)
class _Packet:
    """A coded frame: where it stands in the order of decoding, when it is shown, whether decoding can begin there."""

    time: int  # in the stream's time base
    duration: int  # 0: not known
    is_key: bool


def _from_bytes(data: bytes, name: str, limits: Limits) -> Video:
    with _opened(data, name) as (container, stream):
        check_pixels(stream.codec_context.height, stream.codec_context.width, name, limits)
        if stream.duration is not None and stream.time_base is not None:
            _check_duration(float(stream.duration * stream.time_base), name, limits)
        packets = [
            _Packet(packet.pts if packet.pts is not None else packet.dts, packet.duration or 0, packet.is_keyframe)
            for packet in container.demux(stream)
            if packet.size and (packet.pts is not None or packet.dts is not None)
        ]
        time_base, rate, num_declared = float(stream.time_base or 0), stream.average_rate, stream.frames
        # For files that do not count their frames. With sound beside them, the file may go on after the last.
        is_comparable = container.duration and len(container.streams) == 1 and not num_declared
        declared_s = container.duration / 1e6 if is_comparable else 0.0
    if len(packets) < max(num_declared, 1):
        raise RequestError(f"{name}: the file is cut short: {len(packets)} of {max(num_declared, 1)} frames are there")
    shown = sorted({packet.time for packet in packets})
    times_s = tuple(time * time_base for time in shown)
    duration_s = times_s[-1] - times_s[0]
    _check_duration(duration_s, name, limits)
    fps = float(rate) if rate else (len(shown) - 1) / duration_s if duration_s > 0 else DEFAULT_FPS
    if declared_s > duration_s + packets[-1].duration * time_base + _MAX_MISSING_END_S:
        ends = f"it says {declared_s:.1f} seconds, its frames end after {duration_s:.1f}"
        raise RequestError(f"{name}: the file is cut short: {ends}")
    height, width = _upright_size(data, name, limits)

    def frames(indices: Sequence[int]) -> Iterator[np.ndarray]:
        return _decode(data, name, packets, shown, indices, (height, width))

    digest = hashlib.blake2b(data, digest_size=32).digest()
    varies = _rate_varies(times_s, fps)
    return Video(name, len(shown), fps, height, width, digest, frames, times_s if varies else None)


def _rate_varies(times_s: Sequence[float], fps: float) -> bool:
    off = np.asarray(times_s) - times_s[0] - np.arange(len(times_s)) / fps
    return bool(np.abs(off).max() > _MAX_JITTER_S)


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[tuple[Any, Any]]:
    import av

    try:
        with av.open(io.BytesIO(data), mode="r", options=dict(_OPTIONS)) as container:
            if not container.streams.video:
                raise RequestError(f"{name}: the file has no video in it")
            if container.streams.video[0].codec_context is None:
                raise RequestError(f"{name}: cannot be decoded: there is no decoder for its kind of video")
            yield container, container.streams.video[0]
    except RequestError:
        raise
    except (av.FFmpegError, OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{name}: cannot be decoded: {reason}") from error


def _upright_size(data: bytes, name: str, limits: Limits) -> tuple[int, int]:
    """Height and width of the first frame as it is shown."""
    with _opened(data, name) as (container, stream):
        for frame in container.decode(stream):
            check_pixels(frame.height, frame.width, name, limits)
            return (frame.width, frame.height) if frame.rotation % 180 else (frame.height, frame.width)
    raise RequestError(f"{name}: no frame of it can be decoded")


def _decode(
    data: bytes, name: str, packets: Sequence[_Packet], shown: Sequence[int], indices: Sequence[int],
    size: tuple[int, int],
) -> Iterator[np.ndarray]:  # fmt: skip
    """The frames of rising indices; groups of pictures without any of them are skipped."""
    waiting = [shown[index] for index in indices]
    needed = _needed(packets, set(waiting))
    with _opened(data, name) as (container, stream):
        held: dict[int, np.ndarray] = {}
        for frame in _decoded_frames(container, stream, needed):
            time = frame.pts if frame.pts is not None else frame.dts
            if time in waiting and time not in held:
                if frame.is_corrupt:
                    raise RequestError(f"{name}: the file is damaged at {float(frame.time or 0):.1f} seconds")
                held[time] = _upright(frame, name, size)
            while waiting and waiting[0] in held:
                pixels = held[waiting[0]]
                if waiting[1:2] != waiting[:1]:
                    del held[waiting[0]]
                waiting.pop(0)
                yield pixels
            if not waiting:
                return
    at_s = f"{len(indices) - len(waiting)} of {len(indices)} frames could be decoded"
    raise RequestError(f"{name}: the file is damaged or cut short: {at_s}")


def _needed(packets: Sequence[_Packet], wanted: set[int]) -> list[bool]:
    """Which packets must be decoded: from the key frame before each wanted one up to it.

    A frame shown before its own group's key frame also leans on the group before.
    """
    starts = [index for index, packet in enumerate(packets) if packet.is_key]
    if not starts or starts[0] != 0:
        starts.insert(0, 0)
    needed = [False] * len(packets)
    for group, start in enumerate(starts):
        end = starts[group + 1] if group + 1 < len(starts) else len(packets)
        inside = [index for index in range(start, end) if packets[index].time in wanted]
        if not inside:
            continue
        is_open = any(packets[index].time < packets[start].time for index in inside)
        first = starts[group - 1] if is_open and group else start
        needed[first : inside[-1] + 1] = [True] * (inside[-1] + 1 - first)
    return needed


def _decoded_frames(container: Any, stream: Any, needed: Sequence[bool]) -> Iterator[av.VideoFrame]:
    context = stream.codec_context
    index, is_fed = 0, False
    for packet in container.demux(stream):
        if not packet.size or (packet.pts is None and packet.dts is None):
            continue
        if index < len(needed) and needed[index]:
            yield from packet.decode()
            is_fed = True
        elif is_fed:
            # A gap: what the decoder still holds comes out, and it starts afresh at the next key frame.
            yield from context.decode(None)
            context.flush_buffers()
            is_fed = False
        index += 1
    if is_fed:
        yield from context.decode(None)


def _upright(frame: Any, name: str, size: tuple[int, int]) -> np.ndarray:
    # The rotation is clockwise for negative degrees; numpy turns counter-clockwise.
    pixels = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4))
    if pixels.shape[:2] != size:
        raise RequestError(f"{name}: a frame is {pixels.shape[1]} x {pixels.shape[0]}, the first {size[1]} x {size[0]}")
    return pixels
