"""The worker, in this process and in one of its own: order, cancelling, errors, and what is left behind."""

import asyncio
import contextlib
import io
import os
import queue
import signal
import subprocess
import threading
import time

import av
import numpy as np
import pytest
from fake_diffusion import FakeDiffusion, Gate, fake_backend
from PIL import Image
from processes import family_of, memory_bytes
from test_frames import through

from tilewright.diffusion.params import PipelineTimings
from tilewright.diffusion.requests import (
    DiffusionRequest,
    GeneratedFile,
    Preview,
    Progress,
    Result,
    Start,
    State,
    progress_from_json,
    progress_to_json,
)
from tilewright.diffusion.worker import Worker, preview_steps
from tilewright.outputs.images import encode_image, settings_of
from tilewright.outputs.video import encode_video
from tilewright.server.http.errors import ApiError

WAIT_S = 60


def has_started(progress):
    return progress.start is not None


def has_stepped(progress):
    return progress.step > 0 and progress.preview is None


def has_preview(progress):
    return progress.preview is not None


def is_completed(progress):
    return progress.state is State.COMPLETED


def is_failed(progress):
    return progress.state is State.FAILED


def is_last(progress):
    return progress.is_last


class Events:
    """What a worker emitted, waited for."""

    def __init__(self):
        self._queue = queue.Queue()

    def put(self, request_id, progress):
        self._queue.put((request_id, progress))

    def next(self, is_it):
        """The next progress that `is_it`; others before it are dropped."""
        while True:
            request_id, progress = self._queue.get(timeout=WAIT_S)
            if is_it(progress):
                return request_id, progress

    def result(self):
        """The next result, with the id of its request."""
        request_id, progress = self.next(is_completed)
        return request_id, progress.result

    def failure(self):
        request_id, progress = self.next(is_failed)
        return request_id, progress.failure

    def rest(self):
        found = []
        while not self._queue.empty():
            found.append(self._queue.get())
        return found


def made_by(**options):
    events = Events()
    return Worker(FakeDiffusion(**options), events.put), events


def test_an_image_is_made_with_its_settings():
    worker, events = made_by()
    worker.submit("a", DiffusionRequest("a red tile", {"seed": 7, "n": 2, "width": 32, "height": 16}))
    _, result = events.result()
    worker.close()
    images = [Image.open(io.BytesIO(file.data)) for file in result.files]
    assert [image.size for image in images] == [(32, 16)] * 2
    assert [file.settings["seed"] for file in result.files] == [7, 8]
    assert settings_of(result.files[1].data) == result.files[1].settings
    assert result.timings.steps_s == [0.1] * 3


def test_steps_and_previews_are_told_as_they_come(gate):
    worker, events = made_by(gate=gate.path)
    worker.submit("a", DiffusionRequest("tile", {"num_steps": 4}, num_previews=3))
    began = events.next(has_started)[1]
    assert began.num_steps == 4
    assert (began.start.expected_s, began.start.expected_from) == (2.0, "as FakeDiffusion says")
    for step in (1, 2, 3):
        gate.open()
        assert events.next(has_stepped)[1] == Progress(State.RUNNING, step=step, num_steps=4)
        _, progress = events.next(has_preview)
        assert (progress.step, progress.preview.index) == (step, step - 1)
        assert np.abs(np.asarray(Image.open(io.BytesIO(progress.preview.data))).astype(int) - step).max() <= 2
    gate.open()
    assert is_completed(events.next(lambda progress: is_completed(progress) or has_preview(progress))[1])
    worker.close()


@pytest.mark.parametrize(
    ("num_previews", "num_steps", "steps"), [(0, 8, []), (3, 8, [2, 4, 6]), (3, 2, [1]), (2, 1, []), (1, 9, [4])]
)
def test_previews_are_spread_over_the_steps(num_previews, num_steps, steps):
    assert preview_steps(num_previews, num_steps) == steps


def test_cancelling_ends_a_run_within_a_step_and_frees_what_it_held(gate):
    ballast = 256 << 20
    worker, events = made_by(gate=gate.path, ballast_bytes=ballast)
    before = memory_bytes(os.getpid())
    worker.submit("a", DiffusionRequest("tile", {"num_steps": 50}))
    worker.submit("b", DiffusionRequest("tile", {"num_steps": 1}))
    gate.open(2)
    events.next(has_stepped), events.next(has_stepped)
    assert memory_bytes(os.getpid()) > before + ballast / 2
    worker.cancel("a")
    gate.open()  # the step that it is in
    assert events.next(lambda progress: True)[1] == Progress(State.CANCELLED)
    assert memory_bytes(os.getpid()) < before + ballast / 4
    gate.open()
    assert events.result()[0] == "b"
    worker.close()


def test_the_thread_that_computes_is_prepared():
    events, prepared = Events(), []
    worker = Worker(FakeDiffusion(), events.put, start_thread=lambda: prepared.append(threading.current_thread().name))
    worker.submit("a", DiffusionRequest("tile"))
    events.result()
    worker.close()
    assert prepared == ["diffusion"]


def test_one_that_waits_is_cancelled_without_a_step(gate):
    worker, events = made_by(gate=gate.path)
    worker.submit("a", DiffusionRequest("tile", {"num_steps": 1}))
    worker.submit("b", DiffusionRequest("tile"))
    worker.cancel("b")
    worker.cancel("unknown")
    gate.open()
    assert events.result()[0] == "a"
    assert events.next(lambda progress: True) == ("b", Progress(State.CANCELLED))
    worker.close()
    assert not worker._cancelled and not worker._unfinished


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("fail", "engine", "the server's log has the reason"),
        ("no memory", "request", "not enough memory"),
        ("too long", "request", "900 tokens"),
    ],
)
def test_an_error_ends_its_request_alone(prompt, kind, message):
    worker, events = made_by()
    worker.submit("a", DiffusionRequest(prompt))
    worker.submit("b", DiffusionRequest("tile"))
    request_id, failure = events.failure()
    assert request_id == "a" and failure.kind == kind
    assert message in failure.message and "secret" not in failure.message
    assert events.result()[0] == "b"
    worker.close()


def test_what_the_model_does_not_take_is_refused():
    worker, events = made_by()
    worker.submit("a", DiffusionRequest("tile", {"width": 33}))
    assert "width is 33, expected a multiple of 16" in events.failure()[1].message
    worker.submit("b", DiffusionRequest("tile", image=b"not decoded"))
    assert events.failure()[1].param == "image"
    worker.submit("c", DiffusionRequest("tile", file_format="mp4"))
    assert "makes images, not videos" in events.failure()[1].message
    worker.close()


def test_an_image_that_comes_in_is_decoded_in_a_sandbox():
    worker, events = made_by(takes_image=True)
    red = encode_image(np.full((20, 20, 3), (250, 0, 0), np.uint8), "png", {})
    worker.submit("a", DiffusionRequest("tile", {"width": 16, "height": 16}, red))
    (file,) = events.result()[1].files
    assert np.asarray(Image.open(io.BytesIO(file.data)))[0, 0].tolist() == [250, 0, 0]
    worker.submit("b", DiffusionRequest("tile", image=red[:40]))
    _, failure = events.failure()
    assert failure.kind == "request" and failure.param == "image" and failure.message.startswith("image 1")
    worker.close()


def test_videos_have_the_frames_that_their_seconds_ask_for():
    worker, events = made_by(max_frames=33, fps=24.0)
    worker.submit("a", DiffusionRequest("tile", {"width": 48, "height": 32}, file_format="mp4", seconds=1, fps=8))
    (file,) = events.result()[1].files
    with av.open(io.BytesIO(file.data)) as container:
        assert len(list(container.decode(video=0))) == 9 == file.settings["num_frames"]
        assert container.streams.video[0].average_rate == 8
    worker.submit("c", DiffusionRequest("tile", {"width": 48, "height": 32, "num_frames": 5}, file_format="mp4"))
    assert events.next(has_started)[1].start.fps == 24
    (file,) = events.result()[1].files
    with av.open(io.BytesIO(file.data)) as container:  # what the model was trained with
        assert container.streams.video[0].average_rate == 24
    worker.submit("b", DiffusionRequest("tile", file_format="mp4", seconds=60))
    assert (
        "seconds is 60, 1441 frames at 24 a second, expected at most 1.33333: 33 frames" in events.failure()[1].message
    )
    worker.close()


@pytest.mark.parametrize("file_format", ["png", "jpeg", "webp"])
def test_files_carry_their_settings(file_format):
    pixels = np.zeros((8, 8, 3), np.uint8)
    settings = {"prompt": "ein Löwe 🦁", "seed": 3}
    data = encode_image(pixels, file_format, settings)
    assert settings_of(data) == settings
    assert Image.open(io.BytesIO(data)).format == file_format.upper()


def test_a_video_of_odd_sides_loses_a_row():
    data = encode_video(np.zeros((2, 17, 33, 3), np.uint8), 10)
    with av.open(io.BytesIO(data)) as container:
        frame = next(container.decode(video=0))
    assert (frame.width, frame.height) == (32, 16)


def test_progress_crosses_the_wire():
    result = Result((GeneratedFile(b"data", {"seed": 1}),), PipelineTimings(0.0, 0.1, 0.2, 0.3, [0.1]))
    for progress in (
        Progress(State.QUEUED, num_before=2),
        Progress(State.RUNNING, num_steps=4, start=Start(64, 48, 1, 16.0, 2.5, "as the last one")),
        Progress(State.RUNNING, step=2, num_steps=4, preview=Preview(0, 1, b"\x00\xff")),
        Progress(State.CANCELLED),
        Progress.failed("request", "m", "size"),
        Progress(State.COMPLETED, result=result),
    ):
        assert progress_from_json(through({"progress": progress_to_json(progress)})["progress"]) == progress


# In a process of its own.


class Listener:
    """The events of one request of a DiffusionBackend."""

    def __init__(self):
        self.events = []
        self._changed = asyncio.Condition()
        self._loop = asyncio.get_running_loop()

    def __call__(self, progress):
        self.events.append(progress)
        self._loop.create_task(self._notify())

    async def _notify(self):
        async with self._changed:
            self._changed.notify_all()

    async def until(self, is_it):
        """The first progress that `is_it`."""

        def found():
            return next((progress for progress in self.events if is_it(progress)), None)

        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: found() is not None), WAIT_S)
        return found()


def command_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def run(main):
    asyncio.run(asyncio.wait_for(main, 2 * WAIT_S))


def test_a_process_is_started_by_the_first_request_and_ends_with_the_server(gate):
    async def main():
        backend = fake_backend(gate)
        assert backend.pid is None and backend.limits is None
        first, second = Listener(), Listener()
        backend.submit(DiffusionRequest("tile"), first)
        backend.submit(DiffusionRequest("tile"), second)
        assert [event.num_before for event in second.events] == [1]
        await first.until(has_started)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, backend.pid) == min(own + 10, 19)  # it yields to the engine
        assert (backend.num_waiting, backend.num_running) == (1, 1)
        assert [pid for pid in family_of(os.getpid()) if b"diffusion_process" in command_of(pid)] == [backend.pid]
        assert backend.limits.size_multiple == 16
        gate.open(8)
        assert is_completed(await first.until(is_last)) and is_completed(await second.until(is_last))
        assert [progress for progress in second.events if progress.state is State.QUEUED][-1].num_before == 1
        pid = backend.pid
        await backend.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(main())


def test_a_killed_process_fails_its_request_and_is_replaced(gate):
    async def main():
        backend = fake_backend(gate)
        first, second = Listener(), Listener()
        backend.submit(DiffusionRequest("tile"), first)
        backend.submit(DiffusionRequest("tile"), second)
        await first.until(has_started)
        os.kill(backend.pid, signal.SIGKILL)
        failure = (await first.until(is_last)).failure
        assert failure.kind == "unavailable" and "signal SIGKILL" in failure.message and "restarted" in failure.message
        await second.until(has_started)  # by the next process: only the one under way is lost
        assert backend.num_restarts == 1
        gate.open(4)
        assert is_completed(await second.until(is_last))
        await backend.close()

    run(main())


def test_a_lost_rank_ends_the_process_which_is_replaced():
    async def main():
        backend, first, second = fake_backend(), Listener(), Listener()
        backend.submit(DiffusionRequest("lost"), first)
        backend.submit(DiffusionRequest("tile"), second)
        failure = (await first.until(is_last)).failure
        assert failure.kind == "unavailable" and "status 70" in failure.message
        assert is_completed(await second.until(is_last))
        await backend.close()

    run(main())


def test_cancelled_requests_make_room_for_the_next(gate):
    async def main():
        backend = fake_backend(gate, max_queue=1)
        first, second, third = Listener(), Listener(), Listener()
        cancel_first = backend.submit(DiffusionRequest("tile", {"num_steps": 50}), first)
        await first.until(has_started)
        cancel_second = backend.submit(DiffusionRequest("tile"), second)
        with pytest.raises(ApiError, match="the limit is 1") as caught:
            backend.submit(DiffusionRequest("tile"), third)
        assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
        cancel_second()
        backend.submit(DiffusionRequest("tile"), third)
        cancel_first()
        gate.open(100)  # the first takes one of its 50 steps, or more if it hears of its end late
        await third.until(is_completed)
        assert not [progress for progress in first.events if progress.is_last]  # nobody listens any more
        cancel_first(), cancel_second()
        assert (backend.num_waiting, backend.num_running) == (0, 0)
        await backend.close()

    run(main())


def test_a_model_that_cannot_be_loaded(gate, caplog):
    async def main():
        backend = fake_backend(refuses="/secret/folder has no model_index.json")
        for _ in range(2):  # the second starts it anew
            listener = Listener()
            backend.submit(DiffusionRequest("tile"), listener)
            failure = (await listener.until(is_last)).failure
            assert failure.kind == "unavailable" and "/secret" not in failure.message
        await backend.close()

    run(main())
    assert caplog.text.count("/secret/folder has no model_index.json") == 2


def test_no_process_can_be_started(monkeypatch):
    def no_more_files(*arguments, **options):
        raise OSError(24, "Too many open files")

    async def main():
        backend, listener = fake_backend(), Listener()
        monkeypatch.setattr(subprocess, "Popen", no_more_files)
        backend.submit(DiffusionRequest("tile"), listener)
        assert (await listener.until(is_failed)).failure.kind == "unavailable"
        await backend.close()

    run(main())


def test_the_process_ends_with_a_server_that_is_killed(tmp_path):
    """Its socket closes: nothing is left, not even in the middle of an image."""
    gate = Gate(tmp_path)
    code = f"""
import asyncio, sys
from fake_diffusion import Gate, fake_backend
from tilewright.diffusion.requests import DiffusionRequest
from types import SimpleNamespace

async def main():
    backend = fake_backend(SimpleNamespace(path={gate.path!r}))
    backend.submit(DiffusionRequest("tile"), lambda progress: progress.start and print(backend.pid, flush=True))
    await asyncio.sleep(600)

asyncio.run(main())
"""
    server = subprocess.Popen([os.sys.executable, "-c", code], stdout=subprocess.PIPE, env=_environment())
    try:
        pid = int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    deadline_s = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    gate.close()


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.sys.path)}
