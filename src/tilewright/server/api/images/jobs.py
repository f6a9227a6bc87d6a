"""Finished images and videos, kept in memory within bounds of time and size; and OpenAI's video jobs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.diffusion.requests import Progress, State
from tilewright.server.api.images.respond import error_of, timings_of
from tilewright.server.http.errors import ApiError, as_api_error
from tilewright.server.link.diffusion import Cancel, ProgressListener

RESULT_PATH = "/made/"  # results given by URL; no API key, since the name that follows cannot be guessed
MAX_RESULT_BYTES = 512 * 2**20
KEEP_S = 3600.0


@dataclass(frozen=True)
class KeptResult:
    data: bytes
    media_type: str
    expires_s: float  # by the event loop's clock


class ResultStore:
    """Results by names that cannot be guessed: each for `keep_s` seconds, the oldest dropped above `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_RESULT_BYTES, keep_s: float = KEEP_S) -> None:
        self._max_bytes = max_bytes
        self.keep_s = keep_s
        self._kept: dict[str, KeptResult] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self.size_bytes = 0

    def put(self, data: bytes, media_type: str) -> str:
        """Store a result and return its name."""
        name = secrets.token_urlsafe(24)
        loop = asyncio.get_running_loop()
        self._kept[name] = KeptResult(data, media_type, loop.time() + self.keep_s)
        self.size_bytes += len(data)
        while self.size_bytes > self._max_bytes and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))
        self._set_timer()
        return name

    def get(self, name: str) -> KeptResult | None:
        return self._kept.get(name)

    def drop(self, name: str | None) -> None:
        if name is not None and (result := self._kept.pop(name, None)):
            self.size_bytes -= len(result.data)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kept.clear()
        self.size_bytes = 0

    def _set_timer(self) -> None:
        if self._timer is None and self._kept:
            first = next(iter(self._kept.values()))
            self._timer = asyncio.get_running_loop().call_at(first.expires_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for name in [name for name, result in self._kept.items() if result.expires_s <= now_s]:
            self.drop(name)
        self._set_timer()


MAX_VIDEOS = 64  # jobs that are remembered; finished ones are dropped first

Submit = Callable[[ProgressListener, float | None], Cancel]
Status = Literal["queued", "in_progress", "completed", "failed"]


@dataclass(eq=False)
class VideoJob:
    """One video job, from its request to its result."""

    model: str
    prompt: str
    size: str
    seconds: str
    id: str = field(default_factory=lambda: f"video_{secrets.token_hex(16)}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: Status = "queued"
    progress: int = 0  # percent
    expected_s: float | None = None  # the expected time from its start
    completed_at: int | None = None
    expires_at: int | None = None
    error: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] | None = None
    submitted_s: float = field(default_factory=time.perf_counter)
    queued_s: float = 0.0
    result: str | None = None  # the video's name in the ResultStore
    cancel: Cancel = lambda: None
    release: Callable[[], None] = lambda: None  # releases the memory that the request holds, once
    expiry: asyncio.TimerHandle | None = None

    @property
    def is_done(self) -> bool:
        return self.status in ("completed", "failed")

    def as_object(self) -> dict[str, Any]:
        names = ("id", "model", "prompt", "size", "seconds", "created_at", "status", "progress", "completed_at")
        others = ("expected_s", "expires_at", "error", "settings", "timings")
        found = {name: getattr(self, name) for name in (*names, *others)}
        return {"object": "video", **found, "remixed_from_video_id": None}


class VideoJobs:
    """The video jobs, the latest last. Each is dropped some time after its end, or when there are too many."""

    def __init__(self, results: ResultStore) -> None:
        self._results = results
        self._jobs: dict[str, VideoJob] = {}

    def create(self, job: VideoJob, submit: Submit, release: Callable[[], None]) -> None:
        """Put a job into the queue, or raise the error of submitting it; `release` is called once when it ends."""
        self._make_room()
        job.cancel = submit(lambda progress: self._see(job, progress), job.expected_s)
        job.release = release
        self._jobs[job.id] = job

    def get(self, job_id: str) -> VideoJob:
        job = self._jobs.get(job_id)
        if job is None:
            message = (
                f"there is no video {job_id[:100]!r} here; videos are kept for {self._results.keep_s / 60:g} minutes"
            )
            raise ApiError(404, message, param="video_id", code="video_not_found")
        return job

    def list(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[VideoJob], bool]:
        """Return at most `limit` jobs that follow the job `after`, and whether there are more."""
        jobs = list(self._jobs.values())
        if newest_first:
            jobs.reverse()
        if after is not None:
            jobs = jobs[jobs.index(self.get(after)) + 1 :]
        return jobs[:limit], len(jobs) > limit

    def content(self, job: VideoJob) -> KeptResult:
        if not job.is_done:
            raise ApiError(400, f"the video is {job.status}, {job.progress} %: ask again later", code="video_not_ready")
        if job.error is not None:
            raise ApiError(400, f"the video failed: {job.error['message']}", code="video_failed")
        result = None if job.result is None else self._results.get(job.result)
        if result is None:
            message = "the video is not kept any more: newer results took its place; make it again with its settings"
            raise ApiError(404, message, code="video_expired")
        return result

    def delete(self, job_id: str) -> None:
        """Drop a job and its result; cancel it if it is running."""
        self._forget(self.get(job_id))

    def close(self) -> None:
        for job in list(self._jobs.values()):
            self._forget(job)

    def _forget(self, job: VideoJob) -> None:
        job.cancel()  # no progress follows
        self._release(job)
        if job.expiry is not None:
            job.expiry.cancel()
        self._results.drop(job.result)
        self._jobs.pop(job.id, None)

    def _make_room(self) -> None:
        done = [job for job in self._jobs.values() if job.is_done]
        for job in done[: len(self._jobs) - MAX_VIDEOS + 1]:
            self._forget(job)

    def _see(self, job: VideoJob, progress: Progress) -> None:
        if progress.start is not None:
            start = progress.start
            job.status, job.size = "in_progress", f"{start.width}x{start.height}"
            job.expected_s = start.expected_s
            job.queued_s = time.perf_counter() - job.submitted_s
            job.seconds = f"{start.num_frames / start.fps:.3g}"
        if progress.state is State.RUNNING:
            job.progress = min(99, 100 * progress.step // progress.num_steps)  # decoding and encoding follow
        if progress.result is not None:
            (file,) = progress.result.files
            job.result, job.settings = self._results.put(file.data, "video/mp4"), dict(file.settings)
            job.timings = timings_of(progress.result.timings, job.queued_s)
            self._end(job, "completed")
            job.progress = 100
        if progress.failure is not None:
            known = as_api_error(error_of(progress.failure))
            job.error = {"code": known.code or "failed", "message": known.message}
            self._end(job, "failed")

    def _end(self, job: VideoJob, status: Status) -> None:
        job.status, job.completed_at = status, int(time.time())
        job.expires_at = job.completed_at + int(self._results.keep_s)
        job.expiry = asyncio.get_running_loop().call_later(self._results.keep_s, self._forget, job)
        self._release(job)

    def _release(self, job: VideoJob) -> None:
        release, job.release = job.release, lambda: None
        release()
