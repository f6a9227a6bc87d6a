"""Requests for pictures and videos and the events that answer them, as they cross processes: plain data, no torch."""

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
    """What a client asks for. What it left out is missing in `settings`: the pipeline has the defaults."""

    prompt: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # by the names of GenerationParams
    picture: bytes | None = None  # an encoded one, to edit or to animate
    file_format: FileFormat = "png"
    quality: int = 95  # of jpeg and webp, 0 to 100
    num_previews: int = 0
    seconds: float | None = None  # of a video, instead of num_frames
    fps: float | None = None  # of a video; None: what the model was trained with

    @property
    def is_video(self) -> bool:
        return self.file_format == "mp4"

    def params(self, limits: Limits, picture: Any = None) -> GenerationParams:
        """It as the pipeline of these limits takes it, checked; `picture` is the decoded one, or stands for it."""
        settings = {**self.settings, "num_frames": self._num_frames(limits)}
        return limits.params(self.prompt, **settings, image=picture, output="array")

    def fps_of(self, limits: Limits) -> float:
        """Frames a second of the video."""
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
    """How long a request takes once it is begun, as `diffusion.expected` knows it before."""

    size: str  # "1024x1024", with the number of frames for a video
    seconds: float
    basis: str  # where that is from, as a person reads it
    sizes_in_time: Sequence[str] = ()  # the largest that take no longer than was allowed; where this one takes longer


@dataclass(frozen=True)
class Waiting:
    """The request is in the queue."""

    num_before: int  # requests that are made first, the one under way included


@dataclass(frozen=True)
class Began:
    """The worker has the request; `settings` are what its pictures are made with."""

    width: int
    height: int
    num_frames: int
    num_steps: int
    seed: int
    fps: float  # of a video
    expected_s: float | None = None  # what it takes from here on
    expected_from: str = ""  # where that is from, as a person reads it


@dataclass(frozen=True)
class Stepped:
    """A step is done, counted from 1."""

    step: int
    num_steps: int


@dataclass(frozen=True)
class Previewed:
    """A picture as a step sees it."""

    picture: int  # which of the request's n
    index: int  # which of its previews
    step: int
    num_steps: int
    data: bytes


@dataclass(frozen=True)
class MadeFile:
    """A picture or a video, encoded, and what makes it again."""

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
    steps_s: Sequence[float]  # of each step but the first, which may load what it needs


@dataclass(frozen=True)
class Stopped:
    """The request was cancelled, and what it held is free."""


@dataclass(frozen=True)
class NotMade:
    """There are no pictures."""

    kind: Literal["request", "engine", "unavailable"]
    message: str
    param: str | None = None
    code: str | None = None


PictureEvent = Waiting | Began | Stepped | Previewed | Made | Stopped | NotMade
LAST_EVENTS = (Made, Stopped, NotMade)
_TYPES = {kind.__name__: kind for kind in (Began, Stepped, Previewed, Made, Stopped, NotMade)}


def request_to_json(request: PictureRequest) -> dict[str, Any]:
    """A request as a frame takes it: JSON's types and bytes."""
    return {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}


def request_from_json(fields: Mapping[str, Any]) -> PictureRequest:
    return PictureRequest(**fields)


def event_to_json(event: PictureEvent) -> list[Any]:
    """An event as a list: its type's name and its fields."""
    return [type(event).__name__, dataclasses.asdict(event)]


def event_from_json(value: Sequence[Any]) -> PictureEvent:
    name, fields = value
    if name == "Made":
        fields = {**fields, "files": tuple(MadeFile(**one) for one in fields["files"])}
    return _TYPES[name](**fields)
