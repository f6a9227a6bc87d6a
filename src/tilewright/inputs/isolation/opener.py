"""Opens the media of a request, in this process or in a confined decoder process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tilewright.inputs.audio import OpenedSound, max_samples, open_sound, read_sound
from tilewright.inputs.image import OpenedImage, open_image, read_image
from tilewright.inputs.isolation.pool import DecoderFailed, DecoderKilled, DecoderPool, DecoderProcess
from tilewright.inputs.media import MediaLimits, MediaPart, check_duration, check_pixels
from tilewright.inputs.video import MAX_FILE_FRAMES, OpenedVideo, check_rate, open_video, read_video
from tilewright.types import MediaKind, RequestError, TransientError


class Opener:
    """Opens media: sizes at once, pixels and samples on demand. The calling thread decodes: for trusted media."""

    def open_image(self, part: MediaPart, limits: MediaLimits) -> OpenedImage:
        return open_image(part, limits, self._read_image)

    def open_video(self, part: MediaPart, limits: MediaLimits) -> OpenedVideo:
        return open_video(part, limits, self._read_video, self._read_image)

    def open_sound(self, part: MediaPart, limits: MediaLimits, sample_rate: int) -> OpenedSound:
        return open_sound(part, limits, sample_rate, self._read_sound)

    def close(self) -> None:
        """Do nothing: this opener holds no resources."""

    def _read_image(self, data: bytes, name: str, limits: MediaLimits) -> OpenedImage:
        return read_image(data, name, limits)

    def _read_video(self, data: bytes, name: str, limits: MediaLimits) -> OpenedVideo:
        return read_video(data, name, limits)

    def _read_sound(self, data: bytes, name: str, limits: MediaLimits, sample_rate: int) -> OpenedSound:
        return read_sound(data, name, limits, sample_rate)


_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MediaFault(RequestError):
    """An item whose decoder process crashed, timed out or exceeded its memory."""


class IsolatedOpener(Opener):
    """Opens media with the same results, but decodes encoded media in other processes: for untrusted media.

    A process may use `memory_bytes` beyond its memory at the start, and is replaced after `max_items_per_process`,
    which bounds leaks. Thread-safe; `num_kept` idle processes are kept, about as many as there are calling threads.
    """

    def __init__(self, *, memory_bytes: int = 2**31, max_items_per_process: int = 1000, num_kept: int = 2) -> None:
        self.pool = DecoderPool(memory_bytes, max_items_per_process, num_kept)

    def close(self) -> None:
        """End all processes, busy ones included."""
        self.pool.close()

    def _read_image(self, data: bytes, name: str, limits: MediaLimits) -> OpenedImage:
        item = _Item("image", data, name, limits)
        height, width = self._with_session(item, _Session.image_size)
        check_pixels(height, width, name, limits)

        def decode() -> np.ndarray:
            pixels = self._with_session(item, lambda session: session.decode(height * width * 3, np.uint8))
            return pixels.reshape(height, width, 3)

        return OpenedImage(name, height, width, decode)

    def _read_sound(self, data: bytes, name: str, limits: MediaLimits, sample_rate: int) -> OpenedSound:
        item = _Item("audio", data, name, limits, sample_rate)
        duration_s = self._with_session(item, _Session.duration)
        check_duration(duration_s, name, limits)
        most_bytes = 4 * max_samples(duration_s, sample_rate)

        def decode() -> np.ndarray:
            return self._with_session(item, lambda session: session.decode(most_bytes, np.float32))

        return OpenedSound(name, duration_s, sample_rate, decode)

    def _read_video(self, data: bytes, name: str, limits: MediaLimits) -> OpenedVideo:
        item = _Item("video", data, name, limits)
        (num_frames, fps, height, width), times_s = self._with_session(item, _Session.video_header)
        check_pixels(height, width, name, limits)
        check_rate(fps, name)
        check_duration(times_s[-1] - times_s[0] if times_s else 0.0, name, limits)

        def frames(indices: Sequence[int]) -> Iterator[np.ndarray]:
            num_done = 0
            try:
                for frame in self._frames(item, indices, (height, width, 3)):
                    yield frame
                    num_done += 1
            except TransientError as error:
                _warn_of_second_try(item, error)
                yield from self._frames(item, indices[num_done:], (height, width, 3))

        return OpenedVideo(name, num_frames, fps, height, width, frames, times_s)

    def _with_session(self, item: _Item, use: Callable[[_Session], Result]) -> Result:
        """Return the result of `use`; try a second process if the first was killed."""
        try:
            with self._session(item) as session:
                return use(session)
        except TransientError as error:
            _warn_of_second_try(item, error)
        with self._session(item) as session:
            return use(session)

    def _frames(self, item: _Item, indices: Sequence[int], shape: tuple[int, int, int]) -> Iterator[np.ndarray]:
        with self._session(item) as session:
            yield from session.frames(indices, shape)

    @contextlib.contextmanager
    def _session(self, item: _Item) -> Iterator[_Session]:
        """Lease a process; raise MediaFault if the item makes it fail, TransientError if something else does."""
        try:
            with self.pool.lease(item.token) as process:
                yield _Session(process, item)
        except DecoderKilled as error:
            raise TransientError(f"{item.name} could not be decoded: {error}") from error
        except DecoderFailed as error:
            _log.warning("%s made its decoder fail: %a", item.name, str(error))
            raise MediaFault(f"{item.name}: cannot be decoded: {error}") from error


@dataclasses.dataclass(eq=False)
class _Item:
    kind: MediaKind
    data: bytes
    name: str
    limits: MediaLimits
    sample_rate: int | None = None
    spent_s: float = 0.0  # of limits.max_decode_s, from opening to the end of decoding
    token: object = dataclasses.field(default_factory=object)  # identifies the item without keeping its bytes


class _Session:
    """An item and the process that decodes it."""

    def __init__(self, process: DecoderProcess, item: _Item) -> None:
        self._process = process
        self._item = item

    def image_size(self) -> tuple[int, int]:
        """Open an image and return (height, width)."""
        reply = self.open()
        return _whole(reply, "height"), _whole(reply, "width")

    def duration(self) -> float:
        """Open a sound and return its duration in seconds."""
        return _number(self.open(), "duration_s")

    def video_header(self) -> tuple[tuple[int, float, int, int], tuple[float, ...] | None]:
        """Open a video; return (frames, frames per second, height, width), and its frames' times if they are uneven."""
        reply = self.open()
        num_frames, fps = _whole(reply, "num_frames", MAX_FILE_FRAMES), _number(reply, "fps")
        times_s = _times(reply["times"], num_frames) if reply.get("times") else None
        return (num_frames, fps, _whole(reply, "height"), _whole(reply, "width")), times_s

    def open(self) -> dict[str, Any]:
        """Send the item to the process and return its reply."""
        item, process = self._item, self._process
        process.holds, process.num_items = None, process.num_items + 1
        process.write(item.data)
        process.send(
            {
                "ask": "open",
                "kind": item.kind,
                "name": item.name,
                "size_bytes": len(item.data),
                "sample_rate": item.sample_rate,
                "limits": vars(item.limits),
            }
        )
        reply = self._receive()
        process.holds = item.token
        return reply

    def decode(self, most_bytes: int, dtype: type[np.generic]) -> np.ndarray:
        """Return the item's pixels or samples as a flat array; pixels have exactly the expected size."""
        self._open_again()
        self._process.reserve(most_bytes)
        self._process.send({"ask": "decode", "size_bytes": most_bytes})
        size_bytes = _whole(self._receive(), "size_bytes", most_bytes)
        self._process.holds, self._item.spent_s = None, 0.0
        if self._item.kind == "image" and size_bytes != most_bytes:
            raise DecoderFailed(f"it gave {size_bytes} bytes of {most_bytes}")
        return self._process.read(0, np.empty(size_bytes // np.dtype(dtype).itemsize, dtype))

    def frames(self, indices: Sequence[int], shape: tuple[int, int, int]) -> Iterator[np.ndarray]:
        """Yield the frames at the indices. While the caller uses one, the next is decoded too."""
        size_bytes = math.prod(shape)
        self._open_again()
        self._process.reserve(2 * size_bytes)
        self._process.send({"ask": "frames", "indices": np.asarray(indices, dtype=np.int64).tobytes()})
        self._receive()
        asks: list[dict[str, Any]] = [
            {"ask": "frame", "offset": at % 2 * size_bytes, "size_bytes": size_bytes} for at in range(len(indices))
        ]
        for ask in asks[:1]:
            self._process.send(ask)
        for ask, next_ask in zip(asks, [*asks[1:], None], strict=True):
            if _whole(self._receive(), "size_bytes", size_bytes) != size_bytes:
                raise DecoderFailed(f"it gave less than the {size_bytes} bytes of a frame")
            if next_ask:
                self._process.send(next_ask)
            yield self._process.read(ask["offset"], np.empty(shape, np.uint8))
        self._item.spent_s = 0.0

    def _open_again(self) -> None:
        if self._process.holds is not self._item.token:
            self.open()

    def _receive(self) -> dict[str, Any]:
        item, started_s = self._item, time.monotonic()
        left_s = max(item.limits.max_decode_s - item.spent_s, 0.0)
        try:
            reply = self._process.receive(left_s)
        except TimeoutError:
            raise DecoderFailed(f"it took more than {item.limits.max_decode_s:g} seconds") from None
        item.spent_s += time.monotonic() - started_s
        error, message = reply.get("error"), str(reply.get("message"))[:1000]
        if error == "refused":
            # The process's message begins with the item's name, unless the process was compromised.
            raise RequestError(message if message.startswith(item.name) else f"{item.name}: {message}")
        if error == "memory":
            raise DecoderFailed("it needs more memory than decoding may use")
        if error is not None:
            _log.warning("the decoder of %s failed: %a", item.name, message)
            raise DecoderFailed("its decoder failed; the log has the reason")
        return reply


def _warn_of_second_try(item: _Item, error: TransientError) -> None:
    _log.warning("%s is decoded by another process: %s", item.name, error)
    item.spent_s = 0.0


def _whole(reply: Mapping[str, Any], key: str, most: int = 2**31) -> int:
    value = reply.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise DecoderFailed(f"it answered that its {key} is {value!r:.50}")
    return value


def _number(reply: Mapping[str, Any], key: str) -> float:
    value = reply.get(key)
    if type(value) is not float or not 0 <= value < math.inf:
        raise DecoderFailed(f"it answered that its {key} is {value!r:.50}")
    return value


def _times(data: object, num_frames: int) -> tuple[float, ...]:
    if not isinstance(data, bytes) or len(data) != 8 * num_frames:
        raise DecoderFailed(f"it answered with times of another form than {8 * num_frames} bytes")
    times_s = np.frombuffer(data, dtype=np.float64)
    if not np.isfinite(times_s).all() or (np.diff(times_s) < 0).any():
        raise DecoderFailed("it answered with times that do not rise")
    return tuple(times_s.tolist())
