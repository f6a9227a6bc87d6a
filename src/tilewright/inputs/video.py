"""Videos of any form as frames: files, arrays and lists of pictures; and which of their frames are sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.inputs.image import ReadPicture, array_to_rgb, open_picture, read_picture
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart, check_duration, check_pixels, read_source
from tilewright.inputs.video_file import DEFAULT_FPS, Frames, ReadVideo, read_video
from tilewright.types import RequestError


@dataclass(frozen=True)
class Sampled:
    """Which frames, and when they are shown."""

    indices: tuple[int, ...]
    times_s: tuple[float, ...]


@dataclass(frozen=True)
class Video:
    """A video whose size and frames are known."""

    name: str
    num_frames: int
    fps: float
    height: int
    width: int
    digest: bytes
    frames: Frames
    times_s: tuple[float, ...] | None = None

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


def open_video(
    part: MediaPart,
    limits: MediaLimits,
    fetch: Fetch | None = None,
    read: ReadVideo = read_video,
    read_frame: ReadPicture = read_picture,
) -> Video:
    """The video of a part: bytes, a file, an array [F, H, W, 3], or a list of pictures.

    Encoded ones are left to `read`, encoded pictures of a list to `read_frame`.
    """
    if isinstance(part.source, list | tuple):
        return _from_pictures(part, limits, fetch, read_frame)
    source = read_source(part, limits, fetch)
    if isinstance(source, bytes):
        file = read(source, part.name, limits)
        digest = hashlib.blake2b(source, digest_size=32).digest()
        return Video(
            part.name, file.num_frames, file.fps, file.height, file.width, digest, file.frames, file.times_s
        )  # fmt: skip
    if hasattr(source, "__array__"):
        return _from_array(source, part, limits)
    expected = "bytes, a path, an array of frames or a list of pictures"
    raise RequestError(f"{part.name}: it is a {type(source).__name__}, expected {expected}")


def _from_array(source: Any, part: MediaPart, limits: MediaLimits) -> Video:
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
    return Video(
        part.name, num_frames, fps, height, width, digest.digest(), lambda indices: (pixels[index] for index in indices)
    )


def _from_pictures(part: MediaPart, limits: MediaLimits, fetch: Fetch | None, read_frame: ReadPicture) -> Video:
    if not part.source:
        raise RequestError(f"{part.name}: it has no frames")
    fps = part.fps or DEFAULT_FPS
    check_duration(len(part.source) / fps, part.name, limits)
    pictures = [
        open_picture(MediaPart("image", f"{part.name}, frame {index + 1}", frame), limits, fetch, read_frame)
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
