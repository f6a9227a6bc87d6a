"""The worker: generates images and videos, one request at a time, on its own thread.

    worker = Worker(Diffusion(model), emit=lambda request_id, progress: ...)
    worker.submit("a", DiffusionRequest("a lighthouse at dusk"))
    worker.cancel("a")

`server/link/diffusion_process.py` runs one in a process. A cancelled request ends after its current step, and what it
held is freed when its last progress is emitted. Imports no torch: its model does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tilewright.diffusion.expected import Expected, sizes_in_time
from tilewright.diffusion.params import Cancelled, DiffusionLostError, GenerationParams, Limits
from tilewright.diffusion.requests import (
    DiffusionRequest,
    Expectation,
    GeneratedFile,
    Preview,
    Progress,
    Result,
    Start,
    State,
)
from tilewright.inputs.isolation.opener import IsolatedOpener
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.outputs.images import encode_image
from tilewright.outputs.video import encode_video
from tilewright.types import RequestError, TransientError

_log = logging.getLogger(__name__)

OnStep = Callable[[int, int, Any], object]
Emit = Callable[[str, Progress], None]  # (request id, its progress)
PREVIEW_QUALITY = 80


class DiffusionModel(Protocol):
    """What a worker runs: `tilewright.Diffusion`, or a stand-in for it."""

    @property
    def limits(self) -> Limits: ...

    def expected(self, params: GenerationParams) -> Expected:
        """Return how long `run` takes; also called during a run."""

    def run(self, params: GenerationParams, on_step: OnStep | None = None) -> Any:
        """Return a `Generated`: its images are arrays [T, H, W, 3], as `params` ask for."""

    def preview(self, latents: Any, params: GenerationParams) -> np.ndarray:
        """Return the images that a step predicts, uint8 [n, T, H, W, 3]."""


class Worker:
    """Processes requests in order of submission. One thread calls `expect`, `submit`, `cancel` and `close`.

    `start_thread` is called first on the thread that computes.
    """

    def __init__(
        self,
        model: DiffusionModel,
        emit: Emit,
        media_limits: MediaLimits | None = None,
        start_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self._model = model
        self._start_thread = start_thread
        self._emit = emit
        self._media_limits = media_limits or MediaLimits(allow_paths=False)
        self._opener: IsolatedOpener | None = None  # started for the first image that comes in
        self._waiting: queue.SimpleQueue[tuple[str, DiffusionRequest] | None] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="diffusion", daemon=True)
        self._thread.start()

    def expect(self, request: DiffusionRequest, allowed_s: float | None) -> Expectation | None:
        """Estimate the request's duration, with sizes that take at most `allowed_s`; None for an invalid request.

        An image in the request is not decoded for this: its size counts as the model's default.
        """
        limits = self._model.limits
        try:
            params = request.params(limits, request.image)
        except RequestError:
            return None
        expected = self._model.expected(params)
        size = f"{params.width}x{params.height}"
        if params.num_frames > 1:
            size += f" of {params.num_frames} frames"
        if allowed_s is None or expected.seconds <= allowed_s:
            return Expectation(size, expected.seconds, expected.basis)
        found = sizes_in_time(params, limits, allowed_s, lambda one: self._model.expected(one).seconds)
        names = tuple(f"{width}x{height}" for width, height in found)
        return Expectation(size, expected.seconds, expected.basis, names)

    def submit(self, request_id: str, request: DiffusionRequest) -> None:
        with self._lock:
            self._unfinished.add(request_id)
        self._waiting.put((request_id, request))

    def cancel(self, request_id: str) -> None:
        """End a request after its current step; do nothing if it has ended."""
        with self._lock:
            if request_id in self._unfinished:
                self._cancelled.add(request_id)

    def close(self) -> None:
        """Cancel what is left, and return when the thread has ended."""
        with self._lock:
            self._cancelled |= self._unfinished
        self._waiting.put(None)
        self._thread.join()
        if self._opener is not None:
            self._opener.close()

    def _run(self) -> None:
        self._start_thread()
        while (item := self._waiting.get()) is not None:
            request_id, request = item
            progress = self._made(request_id, request)
            del item, request  # an image to edit may be large
            with self._lock:
                self._unfinished.discard(request_id)
                self._cancelled.discard(request_id)
            _return_memory()
            self._emit(request_id, progress)

    def _made(self, request_id: str, request: DiffusionRequest) -> Progress:
        """Return the request's last progress. An internal error is logged, and the client sees no details of it."""
        try:
            self._check_cancelled(request_id)
            return Progress(State.COMPLETED, result=self._make(request_id, request))
        except Cancelled:
            return Progress(State.CANCELLED)
        except RequestError as error:
            return Progress.failed("request", str(error), error.param, error.code)
        except TransientError as error:
            return Progress.failed("unavailable", f"{error}; send the request again")
        except DiffusionLostError:
            raise  # ends the process, which is then restarted
        except MemoryError:
            _log.exception("there is not enough memory for a request")
            return Progress.failed("request", "there is not enough memory for this size", "size")
        except Exception:
            _log.exception("a request failed")
            return Progress.failed("engine", "the request failed; the server's log has the reason")

    def _make(self, request_id: str, request: DiffusionRequest) -> Result:
        request.params(self._model.limits, request.image)  # refused before its image is decoded
        params = request.params(self._model.limits, self._opened(request.image))
        width, height, num_steps = params.width, params.height, params.num_steps
        fps, expected = request.fps_of(self._model.limits), self._model.expected(params)
        start = Start(width, height, params.num_frames, fps, expected.seconds, expected.basis)
        self._emit(request_id, Progress(State.RUNNING, num_steps=num_steps, start=start))
        _log.info("%d x %d, %d steps: about %.1f s, %s", width, height, num_steps, expected.seconds, expected.basis)
        generated = self._model.run(params, self._on_step(request_id, request, params))
        self._check_cancelled(request_id)  # before files are encoded for nobody
        files = [
            GeneratedFile(_encoded(request, fps, frames, generated.settings_of(index)), generated.settings_of(index))
            for index, frames in enumerate(generated.images)
        ]
        return Result(files, generated.timings)

    def _on_step(self, request_id: str, request: DiffusionRequest, params: GenerationParams) -> OnStep:
        previews = preview_steps(request.num_previews, params.num_steps)

        def on_step(step: int, num_steps: int, latents: Any) -> None:
            self._check_cancelled(request_id)
            self._emit(request_id, Progress(State.RUNNING, step=step, num_steps=num_steps))
            if step in previews:
                index = previews.index(step)
                for image_index, frames in enumerate(self._model.preview(latents, params)):
                    preview = Preview(image_index, index, encode_image(frames[0], "jpeg", {}, PREVIEW_QUALITY))
                    self._emit(request_id, Progress(State.RUNNING, step=step, num_steps=num_steps, preview=preview))

        return on_step

    def _check_cancelled(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._cancelled:
                raise Cancelled

    def _opened(self, data: bytes | None) -> Any:
        """Decode a request's image in a sandboxed process."""
        if data is None:
            return None
        from PIL import Image

        if self._opener is None:
            self._opener = IsolatedOpener(num_kept=1)
        try:
            image = self._opener.open_image(MediaPart("image", "image 1", data), self._media_limits)
            return Image.fromarray(image.decode())
        except RequestError as error:
            error.param = error.param or "image"
            raise


def preview_steps(num_previews: int, num_steps: int) -> list[int]:
    """Return the steps after which previews are made, evenly spaced and before the last."""
    wanted = (round(num_steps * (index + 1) / (num_previews + 1)) for index in range(num_previews))
    return sorted({step for step in wanted if 1 <= step < num_steps})


def _encoded(request: DiffusionRequest, fps: float, frames: np.ndarray, settings: dict[str, Any]) -> bytes:
    """Return the encoded file of [T, H, W, 3]."""
    if request.is_video:
        return encode_video(frames, fps, settings=settings)
    return encode_image(frames[0], request.file_format, settings, request.quality)


def _return_memory() -> None:
    """Return freed memory to the system: an image's activations are far larger than the waiting requests."""
    with contextlib.suppress(AttributeError, OSError):  # musl has no such call, and keeps less
        ctypes.CDLL(None).malloc_trim(0)
