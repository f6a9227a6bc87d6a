"""Requests for pictures and videos and the events that answer them, as plain data between processes. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.diffusion.params import GenerationParams, Limits
from tilewright.types import RequestError

FileFormat = Literal["png", "jpeg", "webp", "mp4"]
MAX_FPS = 60.0


@dataclass(frozen=True)
class PictureRequest:
    """A client's request. `settings` has only what the client gave: the pipeline has the defaults."""

    prompt: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # by the names of GenerationParams
    picture: bytes | None = None  # an encoded picture to edit or to animate
    file_format: FileFormat = "png"
    quality: int = 95  # of jpeg and webp, 0 to 100
    num_previews: int = 0
    seconds: float | None = None  # of a video, instead of num_frames
    fps: float | None = None  # of a video; None: the model's training rate

    @property
    def is_video(self) -> bool:
        return self.file_format == "mp4"

    def params(self, limits: Limits, picture: Any = None) -> GenerationParams:
        """Return the request with defaults filled in, checked against the pipeline's limits.

        `picture` is the decoded one, or a placeholder for it.
        """
        settings = {**self.settings, "num_frames": self._num_frames(limits)}
        return limits.params(self.prompt, **settings, image=picture, output="array")

    def fps_of(self, limits: Limits) -> float:
        """Return the frames per second of the video."""
        return limits.fps if self.fps is None else self.fps

    def _num_frames(self, limits: Limits) -> int | None:
        if not self.is_video:
            return 1
        if limits.max_frames == 1:
            raise RequestError("this model makes pictures, not videos", param="model")
        if self.settings.get("num_frames") is not None or self.seconds is None:
            return self.settings.get("num_frames")
        fps = self.fps_of(limits)
        num_frames = 1 + limits.frame_multiple * round(self.seconds * fps / limits.frame_multiple)
        if num_frames > limits.max_frames:
            most_s = (limits.max_frames - 1) / fps
            raise RequestError(
                f"seconds is {self.seconds:g}, {num_frames} frames at {fps:g} a second, "
                f"expected at most {most_s:g}: {limits.max_frames} frames",
                param="seconds",
            )
        return num_frames


@dataclass(frozen=True)
class Expectation:
    """Estimated duration of a request, from `diffusion.expected`."""

    size: str  # "1024x1024", with the number of frames for a video
    seconds: float
    basis: str  # source of the estimate, for people
    sizes_in_time: Sequence[str] = ()  # the largest that take at most the allowed time, if this one takes longer


@dataclass(frozen=True)
class Waiting:
    """The request is in the queue."""

    num_before: int  # requests before this one, including the one under way


@dataclass(frozen=True)
class Began:
    """The worker has started the request; `settings` are those of its pictures."""

    width: int
    height: int
    num_frames: int
    num_steps: int
    seed: int
    fps: float  # of a video
    expected_s: float | None = None  # remaining duration
    expected_from: str = ""  # source of the estimate, for people


@dataclass(frozen=True)
class Stepped:
    """A step is done, counted from 1."""

    step: int
    num_steps: int


@dataclass(frozen=True)
class Previewed:
    """A preview of one picture after a step."""

    picture: int  # index of the picture in the request
    index: int  # index of the preview
    step: int
    num_steps: int
    data: bytes


@dataclass(frozen=True)
class MadeFile:
    """An encoded picture or video, and the settings that reproduce it."""

    data: bytes
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """All pictures of the request."""

    files: Sequence[MadeFile]
    load_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    steps_s: Sequence[float]  # of each step but the first, which may load components


@dataclass(frozen=True)
class Stopped:
    """The request was cancelled, and what it held is freed."""


@dataclass(frozen=True)
class NotMade:
    """The request failed: there are no pictures."""

    kind: Literal["request", "engine", "unavailable"]
    message: str
    param: str | None = None
    code: str | None = None


PictureEvent = Waiting | Began | Stepped | Previewed | Made | Stopped | NotMade
LAST_EVENTS = (Made, Stopped, NotMade)
_TYPES = {kind.__name__: kind for kind in (Began, Stepped, Previewed, Made, Stopped, NotMade)}


def request_to_json(request: PictureRequest) -> dict[str, Any]:
    """Return a request as JSON types and bytes, for a frame."""
    return {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}


def request_from_json(fields: Mapping[str, Any]) -> PictureRequest:
    return PictureRequest(**fields)


def event_to_json(event: PictureEvent) -> list[Any]:
    """Return an event as a list: its type's name and its fields."""
    return [type(event).__name__, dataclasses.asdict(event)]


def event_from_json(value: Sequence[Any]) -> PictureEvent:
    name, fields = value
    if name == "Made":
        fields = {**fields, "files": tuple(MadeFile(**one) for one in fields["files"])}
    return _TYPES[name](**fields)
