"""Requests for images and videos, and the progress that answers them, as plain data between processes. No torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.diffusion.params import GenerationParams, Limits, PipelineTimings
from tilewright.types import RequestError

FileFormat = Literal["png", "jpeg", "webp", "mp4"]
MAX_FPS = 60.0


@dataclass(frozen=True)
class DiffusionRequest:
    """A client's request. `settings` has only what the client gave: the pipeline has the defaults."""

    prompt: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # by the names of GenerationParams
    image: bytes | None = None  # an encoded image to edit or to animate
    file_format: FileFormat = "png"
    quality: int = 95  # of jpeg and webp, 0 to 100
    num_previews: int = 0
    seconds: float | None = None  # of a video, instead of num_frames
    fps: float | None = None  # of a video; None: the model's training rate

    @property
    def is_video(self) -> bool:
        return self.file_format == "mp4"

    def params(self, limits: Limits, image: Any = None) -> GenerationParams:
        """Return the request with defaults filled in, checked against the pipeline's limits.

        `image` is the decoded one, or a placeholder for it.
        """
        settings = {**self.settings, "num_frames": self._num_frames(limits)}
        return limits.params(self.prompt, **settings, image=image, output="array")

    def fps_of(self, limits: Limits) -> float:
        """Return the frames per second of the video."""
        return limits.fps if self.fps is None else self.fps

    def _num_frames(self, limits: Limits) -> int | None:
        if not self.is_video:
            return 1
        if limits.max_frames == 1:
            raise RequestError("this model makes images, not videos", param="model")
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


class State(str, enum.Enum):
    """State of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # and what it held is freed
    FAILED = "failed"


@dataclass(frozen=True)
class Start:
    """The settings that the worker starts a request with."""

    width: int
    height: int
    num_frames: int
    fps: float  # of a video
    expected_s: float | None = None  # remaining duration
    expected_from: str = ""  # source of the estimate, for people


@dataclass(frozen=True)
class Preview:
    """A preview of one image after a step."""

    image_index: int  # index of the image in the request
    index: int  # index of the preview
    data: bytes  # a JPEG


@dataclass(frozen=True)
class GeneratedFile:
    """An encoded image or video, and the settings that reproduce it."""

    data: bytes
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """All files of a request, and how long they took."""

    files: Sequence[GeneratedFile]
    timings: PipelineTimings


FailureKind = Literal["request", "engine", "unavailable"]  # whose fault it is, or that another try may help


@dataclass(frozen=True)
class Failure:
    """The reason why a request has no result."""

    kind: FailureKind
    message: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a request, emitted at every change. After one that `is_last` there are no more."""

    state: State
    num_before: int = 0  # while QUEUED: requests before this one, including the one under way
    step: int = 0  # while RUNNING: the number of finished steps
    num_steps: int = 0
    start: Start | None = None  # in the first while RUNNING
    preview: Preview | None = None  # while RUNNING: after `step`
    result: Result | None = None  # if COMPLETED
    failure: Failure | None = None  # if FAILED

    @staticmethod
    def failed(kind: FailureKind, message: str, param: str | None = None, code: str | None = None) -> Progress:
        """Return the last progress of a request without a result."""
        return Progress(State.FAILED, failure=Failure(kind, message, param, code))

    @property
    def is_last(self) -> bool:
        return self.state in (State.COMPLETED, State.CANCELLED, State.FAILED)


def request_to_json(request: DiffusionRequest) -> dict[str, Any]:
    """Return a request as JSON types and bytes, for a frame."""
    return {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}


def request_from_json(fields: Mapping[str, Any]) -> DiffusionRequest:
    return DiffusionRequest(**fields)


def progress_to_json(progress: Progress) -> dict[str, Any]:
    """Return the fields that are set, as JSON types and bytes."""
    return {name: value for name, value in dataclasses.asdict(progress).items() if value is not None}


_PARTS = {"start": Start, "preview": Preview, "failure": Failure}


def progress_from_json(fields: Mapping[str, Any]) -> Progress:
    parts: dict[str, Any] = {name: kind(**fields[name]) for name, kind in _PARTS.items() if name in fields}
    if "result" in fields:
        files = tuple(GeneratedFile(**one) for one in fields["result"]["files"])
        parts["result"] = Result(files, PipelineTimings(**fields["result"]["timings"]))
    return Progress(**{**fields, **parts, "state": State(fields["state"])})
