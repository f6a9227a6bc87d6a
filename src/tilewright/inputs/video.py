"""Reads videos as frames: files, arrays and lists of images. Only the sampled frames are decoded.

A file is opened such that it cannot access other files or addresses.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.inputs.image import (
    ReadImage,
    animation_frames,
    array_to_rgb,
    frame_delays_s,
    open_image,
    read_image,
)
from tilewright.inputs.media import UNREADABLE, MediaLimits, MediaPart, check_duration, check_pixels, read_source
from tilewright.types import RequestError

if TYPE_CHECKING:
    import av


@contextmanager
def opened_container(data: bytes, name: str, formats: str) -> Iterator[Any]:
    """Open the bytes as a container of PyAV; its errors within the block become RequestErrors.

    `formats` are FFmpeg's names of self-contained formats. FFmpeg also reads playlists, and would open the files and
    addresses that they name.
    """
    import av

    options = {"format_whitelist": formats, "protocol_whitelist": "none"}
    try:
        # A title in an old encoding is no reason to refuse a file.
        with av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="replace") as container:
            yield container
    except RequestError:
        raise
    except (av.FFmpegError, OSError, ValueError, EOFError, OverflowError) as error:
        raise RequestError(f"{name}: cannot be decoded: {UNREADABLE}") from error


# For frames without a rate; the default of the models' processors.
DEFAULT_FPS = 24.0
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg,asf"
MAX_FILE_FRAMES = 2**20  # an hour at 240 a second has 864,000; each takes a record while the file is open
_MAX_HELD = 32  # decoded frames that wait for an earlier one; decoders reorder at most 16
# If frames deviate more than this from an even rate, their own times are used: models read times to a tenth of a
# second. A few dropped frames leave the rate even.
_MAX_JITTER_S = 0.1
# Seconds that a file's declared duration may exceed its frames': some round up.
_MAX_MISSING_END_S = 0.5

Frames = Callable[[Sequence[int]], Iterator[np.ndarray]]  # ascending indices -> [height, width, 3] uint8 each


@dataclass(frozen=True)
class SampledFrames:
    """Indices and times of sampled frames."""

    indices: tuple[int, ...]
    times_s: tuple[float, ...]


@dataclass(frozen=True)
class OpenedVideo:
    """A video of known size, rate and number of frames; `frames` decodes some of them on demand.

    `open_video` makes it of a MediaPart; a processor makes a PreparedMedium of it.
    """

    name: str
    num_frames: int
    fps: float
    height: int
    width: int
    frames: Frames
    times_s: tuple[float, ...] | None = None  # of every frame, if the rate varies
    digest: bytes = b""  # of the file, or of the pixels and their rate; empty in a decoder process

    def sample(self, indices: Sequence[int]) -> SampledFrames:
        """Return the frames nearest to the times of evenly spread indices."""
        if self.times_s is None:
            return SampledFrames(tuple(indices), tuple(index / self.fps for index in indices))
        times = np.asarray(self.times_s)
        last = max(self.num_frames - 1, 1)
        wanted = times[0] + np.asarray(indices) / last * (times[-1] - times[0])
        after = np.clip(np.searchsorted(times, wanted), 1, last) if self.num_frames > 1 else np.zeros(1, dtype=int)
        nearest = np.where(wanted - times[after - 1] <= times[after] - wanted, after - 1, after)
        return SampledFrames(tuple(nearest.tolist()), tuple((times[nearest] - times[0]).tolist()))


ReadVideo = Callable[[bytes, str, MediaLimits], OpenedVideo]  # (encoded bytes, item's name for errors, limits)


def read_video(data: bytes, name: str, limits: MediaLimits) -> OpenedVideo:
    """Return the video in the bytes, without a digest; its frames are decoded on demand, in this process."""
    if (delays_s := frame_delays_s(data)) is not None:
        return _read_animation(data, name, limits, delays_s)
    with _opened(data, name, limits) as (container, stream):
        check_pixels(stream.codec_context.height, stream.codec_context.width, name, limits)
        if stream.duration is not None and stream.time_base is not None:
            check_duration(float(stream.duration * stream.time_base), name, limits)
        packets = _packets(container, stream, name)
        time_base, rate, num_declared = float(stream.time_base or 0), stream.average_rate, stream.frames
        # For files without a frame count. A file with sound may be longer than its video.
        is_comparable = container.duration and len(container.streams) == 1 and not num_declared
        declared_s = container.duration / 1e6 if is_comparable else 0.0
    if len(packets) < max(num_declared, 1):
        raise RequestError(f"{name}: the file is cut short: {len(packets)} of {max(num_declared, 1)} frames are there")
    shown = sorted({packet.time for packet in packets})
    times_s = tuple(time * time_base for time in shown)
    duration_s = times_s[-1] - times_s[0]
    check_duration(duration_s, name, limits)
    fps = float(rate) if rate else (len(shown) - 1) / duration_s if duration_s > 0 else DEFAULT_FPS
    check_rate(fps, name)
    if declared_s > duration_s + packets[-1].duration * time_base + _MAX_MISSING_END_S:
        ends = f"it declares {declared_s:.1f} seconds, its frames end after {duration_s:.1f}"
        raise RequestError(f"{name}: the file is cut short: {ends}")
    height, width = _upright_size(data, name, limits)

    def frames(indices: Sequence[int]) -> Iterator[np.ndarray]:
        with _opened(data, name, limits) as (container, stream):
            yield from _decode(container, stream, name, packets, [shown[index] for index in indices], (height, width))

    return OpenedVideo(name, len(shown), fps, height, width, frames, times_s if _rate_varies(times_s, fps) else None)


def _read_animation(data: bytes, name: str, limits: MediaLimits, delays_s: Sequence[float]) -> OpenedVideo:
    if len(delays_s) > MAX_FILE_FRAMES:
        raise RequestError(f"{name}: more than {MAX_FILE_FRAMES} frames, which is the limit of a file")
    duration_s = sum(delays_s)
    check_duration(duration_s, name, limits)
    fps = len(delays_s) / duration_s
    check_rate(fps, name)
    first = read_image(data, name, limits)
    times_s = tuple(accumulate(delays_s[:-1], initial=0.0))

    def frames(indices: Sequence[int]) -> Iterator[np.ndarray]:
        for pixels in animation_frames(data, name, indices, limits):
            if pixels.shape[:2] != (first.height, first.width):
                raise RequestError(
                    f"{name}: a frame is {pixels.shape[1]} x {pixels.shape[0]}, its header says otherwise"
                )
            yield pixels

    varies = _rate_varies(times_s, fps)
    return OpenedVideo(name, len(delays_s), fps, first.height, first.width, frames, times_s if varies else None)


@dataclass(frozen=True)
class _Packet:
    """A coded frame: its time and duration, and whether decoding can begin with it."""

    time: int  # in the stream's time base
    duration: int  # 0: not known
    is_key: bool


def check_rate(fps: float, name: str) -> None:
    """Raise RequestError for impossible rates: times computed from them would overflow."""
    if not 1e-4 <= fps <= 1e6:
        raise RequestError(f"{name}: {fps:g} frames a second, expected 0.0001 to 1000000")


def _packets(container: Any, stream: Any, name: str) -> list[_Packet]:
    packets: list[_Packet] = []
    for packet in container.demux(stream):
        if not packet.size or (packet.pts is None and packet.dts is None):
            continue
        if len(packets) == MAX_FILE_FRAMES:
            raise RequestError(f"{name}: more than {MAX_FILE_FRAMES} frames, which is the limit of a file")
        time = packet.pts if packet.pts is not None else packet.dts
        packets.append(_Packet(time, packet.duration or 0, packet.is_keyframe))
    return packets


def _rate_varies(times_s: Sequence[float], fps: float) -> bool:
    off = np.asarray(times_s) - times_s[0] - np.arange(len(times_s)) / fps
    return bool(np.abs(off).max() > _MAX_JITTER_S)


@contextmanager
def _opened(data: bytes, name: str, limits: MediaLimits) -> Iterator[tuple[Any, Any]]:
    with opened_container(data, name, _CONTAINERS) as container:
        if not container.streams.video:
            raise RequestError(f"{name}: the file has no video")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise RequestError(f"{name}: cannot be decoded: there is no decoder for its kind of video")
        # Each frame may have a size of its own. Twice the limit: decoders round sizes up to whole blocks.
        stream.codec_context.options = {"max_pixels": str(min(2 * limits.max_pixels, 2**31 - 1))}
        stream.codec_context.thread_count = 1  # more would take cores from the model, and speed up few files
        yield container, stream


def _upright_size(data: bytes, name: str, limits: MediaLimits) -> tuple[int, int]:
    """Return height and width of the first frame after rotation."""
    with _opened(data, name, limits) as (container, stream):
        for frame in container.decode(stream):
            check_pixels(frame.height, frame.width, name, limits)
            return _shown_size(frame)
    raise RequestError(f"{name}: no frame of it can be decoded")


def _decode(
    container: Any, stream: Any, name: str, packets: Sequence[_Packet], waiting: list[int], size: tuple[int, int]
) -> Iterator[np.ndarray]:
    """Yield the frames at the ascending times in `waiting`; groups of pictures without any of them are skipped."""
    num_wanted = len(waiting)
    needed = _needed(packets, set(waiting))
    held: dict[int, np.ndarray] = {}
    for frame in _decoded_frames(container, stream, needed):
        time = frame.pts if frame.pts is not None else frame.dts
        if time in waiting and time not in held:
            if frame.is_corrupt:
                raise RequestError(f"{name}: the file is damaged at {float(frame.time or 0):.1f} seconds")
            if len(held) == _MAX_HELD:
                raise RequestError(f"{name}: the file is damaged: its frames are out of order")
            held[time] = _upright(frame, name, size)
        while waiting and waiting[0] in held:
            pixels = held[waiting[0]]
            if waiting[1:2] != waiting[:1]:
                del held[waiting[0]]
            waiting.pop(0)
            yield pixels
        if not waiting:
            return
    at_s = f"{num_wanted - len(waiting)} of {num_wanted} frames could be decoded"
    raise RequestError(f"{name}: the file is damaged or cut short: {at_s}")


def _needed(packets: Sequence[_Packet], wanted: set[int]) -> list[bool]:
    """Return, for each packet, whether it must be decoded: from the key frame before each wanted frame up to it.

    A frame that is shown before its group's key frame also depends on the previous group.
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
            # A gap: flush the decoder, which restarts at the next key frame.
            yield from context.decode(None)
            context.flush_buffers()
            is_fed = False
        index += 1
    if is_fed:
        yield from context.decode(None)


def _shown_size(frame: Any) -> tuple[int, int]:
    return (frame.width, frame.height) if frame.rotation % 180 else (frame.height, frame.width)


def _upright(frame: Any, name: str, size: tuple[int, int]) -> np.ndarray:
    height, width = _shown_size(frame)
    if (height, width) != size:
        raise RequestError(f"{name}: a frame is {width} x {height}, the first {size[1]} x {size[0]}")
    # The rotation is clockwise for negative degrees; numpy turns counter-clockwise.
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4))


def open_video(
    part: MediaPart,
    limits: MediaLimits,
    read: ReadVideo = read_video,
    read_frame: ReadImage = read_image,
) -> OpenedVideo:
    """Return the video of a part: bytes, a file, an array [F, H, W, 3], or a list of images.

    `read` reads encoded videos, `read_frame` encoded images of a list.
    """
    if isinstance(part.source, list | tuple):
        return _from_images(part, limits, read_frame)
    source = read_source(part, limits)
    if isinstance(source, bytes):
        digest = hashlib.blake2b(source, digest_size=32).digest()
        return replace(read(source, part.name, limits), digest=digest)
    if hasattr(source, "__array__"):
        return _from_array(source, part, limits)
    expected = "bytes, a path, an array of frames or a list of images"
    raise RequestError(f"{part.name}: it is a {type(source).__name__}, expected {expected}")


def _from_array(source: Any, part: MediaPart, limits: MediaLimits) -> OpenedVideo:
    array = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    if array.ndim != 4 or 0 in array.shape:
        raise RequestError(f"{part.name}: its shape is {list(array.shape)}, expected [frames, H, W, 3]")
    pixels = array_to_rgb(array, part.name)
    num_frames, height, width = pixels.shape[:3]
    check_pixels(height, width, part.name, limits)
    fps = part.fps or DEFAULT_FPS
    check_duration(num_frames / fps, part.name, limits)
    digest = hashlib.blake2b(repr((pixels.shape, fps)).encode(), digest_size=32)
    digest.update(pixels.data)
    return OpenedVideo(
        part.name,
        num_frames,
        fps,
        height,
        width,
        lambda indices: (pixels[index] for index in indices),
        digest=digest.digest(),
    )


def _from_images(part: MediaPart, limits: MediaLimits, read_frame: ReadImage) -> OpenedVideo:
    if not part.source:
        raise RequestError(f"{part.name}: it has no frames")
    fps = part.fps or DEFAULT_FPS
    check_duration(len(part.source) / fps, part.name, limits)
    images = [
        open_image(MediaPart("image", f"{part.name}, frame {index + 1}", frame), limits, read_frame)
        for index, frame in enumerate(part.source)
    ]
    first = images[0]
    for image in images:
        if (image.height, image.width) != (first.height, first.width):
            size, expected = f"{image.width} x {image.height}", f"{first.width} x {first.height}"
            raise RequestError(f"{image.name}: {size}, the first frame is {expected}")
    digest = hashlib.blake2b(b"".join(image.digest for image in images) + repr(fps).encode(), digest_size=32)
    return OpenedVideo(
        part.name,
        len(images),
        fps,
        first.height,
        first.width,
        lambda indices: (images[index].decode() for index in indices),
        digest=digest.digest(),
    )
