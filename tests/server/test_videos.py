"""/v1/videos over HTTP, with OpenAI's client, in front of a process that makes fake videos."""

import contextlib
import io
import os
import signal
import urllib.error
import urllib.request

import av
import openai
import pytest
from conftest import ScriptedBackend, serving
from fake_diffusion import NAME, fake_backend
from page_browser import png
from test_images import WAIT_S, metric, until

from tilewright.server.api.images import jobs as videos
from tilewright.server.api.images.jobs import ResultStore

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def make(gate=None, **options):
            options = {"max_frames": 33, "takes_image": True, **options}
            return stack.enter_context(serving(ScriptedBackend, make_diffusion=lambda: fake_backend(gate, **options)))

        yield make


def frames(data):
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_a_video_from_its_creation_to_its_deletion(serve, gate):
    client = (running := serve(gate)).client()
    job = client.videos.create(prompt="a tile turns", seconds="1", size="64x32", extra_body={"fps": "8", "seed": "3"})
    assert job.id.startswith("video_") and job.status == "queued" and job.model == NAME and job.object == "video"
    gate.open(2)
    until(lambda: client.videos.retrieve(job.id).progress == 50)
    with pytest.raises(openai.BadRequestError, match="the video is in_progress, 50 %"):
        client.videos.download_content(job.id)
    gate.open(2)
    until(lambda: client.videos.retrieve(job.id).status == "completed")
    done = client.videos.retrieve(job.id)
    assert (done.progress, done.size, done.seconds) == (100, "64x32", "1.12") and done.expires_at > done.completed_at
    assert (
        done.expected_s == job.expected_s == pytest.approx(4 / 3)
        and done.timings["step_s"] > 0
        and done.timings["queued_s"] >= 0
    )
    assert done.settings["seed"] == 3 and done.settings["num_frames"] == 9 and done.error is None
    content = client.videos.download_content(job.id)
    assert content.response.headers["content-type"] == "video/mp4"
    assert len(found := frames(content.read())) == 9 and found[0].shape == (32, 64, 3)
    with pytest.raises(openai.BadRequestError, match="variant is 'thumbnail'"):
        client.videos.download_content(job.id, variant="thumbnail")
    assert metric(running, "tilewright_videos_total") == 1
    deleted = client.videos.delete(job.id)
    assert deleted.deleted and deleted.object == "video.deleted" and deleted.id == job.id
    assert running.handler.diffusion.results.size_bytes == 0
    for gone in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError, match="there is no video"):
            gone(job.id)


def test_a_video_begins_with_an_image(serve):
    client = serve().client()
    job = client.videos.create(prompt="turn", size="32x32", input_reference=("red.png", png(32, 32, "#ff0000")))
    until(lambda: client.videos.retrieve(job.id).status == "completed")
    pixel = frames(client.videos.download_content(job.id).read())[-1][16, 16]
    assert pixel[0] > 240 and max(pixel[1:]) < 20
    bad = client.videos.create(prompt="turn", input_reference=("red.png", b"no image"))
    until(lambda: client.videos.retrieve(bad.id).status == "failed")
    assert "not an image" in client.videos.retrieve(bad.id).error.message
    with pytest.raises(openai.BadRequestError, match="the video failed"):
        client.videos.download_content(bad.id)


def test_a_video_has_the_frame_rate_of_the_model(serve):
    client = serve(fps=24.0).client()
    job = client.videos.create(prompt="a tile turns", seconds="1", size="64x32")
    until(lambda: client.videos.retrieve(job.id).status == "completed")
    done = client.videos.retrieve(job.id)
    assert done.settings["num_frames"] == 25 and done.seconds == "1.04"
    with av.open(io.BytesIO(client.videos.download_content(job.id).read())) as container:
        assert container.streams.video[0].average_rate == 24


def test_deleting_cancels_what_is_under_way(serve, gate):
    client = (running := serve(gate)).client()
    first = client.videos.create(prompt="one", extra_body={"steps": "50"})
    second = client.videos.create(prompt="two")
    gate.open(1)
    until(lambda: client.videos.retrieve(first.id).progress == 2)
    client.videos.delete(second.id)
    client.videos.delete(first.id)
    assert metric(running, "tilewright_pictures_cancelled_total") == 2
    assert metric(running, "tilewright_pictures_waiting") == 0
    gate.open_until(lambda: metric(running, "tilewright_pictures_running") == 0)
    assert client.videos.list().data == [] and metric(running, "tilewright_videos_total") == 0


def test_deleting_gives_back_what_the_request_holds_once():
    released = []
    jobs = videos.VideoJobs(ResultStore())
    job = videos.VideoJob(NAME, "turn", "auto", "auto")
    jobs.create(job, lambda listener, expected_s: lambda: None, lambda: released.append(job.id))
    jobs.delete(job.id)
    jobs.close()
    assert released == [job.id]


def test_a_killed_worker_fails_the_job(serve, gate):
    client = (running := serve(gate)).client()
    job = client.videos.create(prompt="one")
    until(lambda: client.videos.retrieve(job.id).status == "in_progress")
    os.kill(running.handler.served.image_models[0].backend.pid, signal.SIGKILL)
    until(lambda: client.videos.retrieve(job.id).status == "failed")
    error = client.videos.retrieve(job.id).error
    assert error.code == "engine_unavailable" and "signal SIGKILL" in error.message


def test_lists_and_bounds(serve, monkeypatch):
    monkeypatch.setattr(videos, "MAX_VIDEOS", 3)
    client = (running := serve()).client()
    ids = []
    for number in range(4):
        ids.append(client.videos.create(prompt=f"tile {number}", size="16x16", seconds="1").id)
        until(lambda: client.videos.retrieve(ids[-1]).status == "completed")
    assert [job.id for job in client.videos.list().data] == ids[:0:-1]  # the oldest made room
    page = client.videos.list(limit=2, order="asc")
    assert [job.id for job in page.data] == ids[1:3] and page.has_more
    assert [job.id for job in client.videos.list(limit=2, order="asc", after=ids[2]).data] == ids[3:]
    store = running.handler.diffusion.results
    running.loop.call_soon_threadsafe(store.drop, next(iter(store._kept)))
    with pytest.raises(openai.NotFoundError, match="not kept any more"):
        client.videos.download_content(ids[1])
    for query, message in (("limit=0", "limit is 0"), ("order=up", "order is 'up'"), ("after=x", "there is no video")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{running.url}/v1/videos?{query}", timeout=WAIT_S)
        assert caught.value.code in (400, 404) and message in caught.value.read().decode()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"seconds": 60}, "seconds", "seconds is 60, 961 frames at 16 a second, expected at most 2: 33 frames"),
        ({"seconds": "soon"}, "seconds", "seconds is 'soon'"),
        ({"num_frames": 34}, "num_frames", "num_frames is 34, expected an integer from 1 to 33"),
        ({"num_frames": 8}, "num_frames", "num_frames is 8, expected 1 more than a multiple of 4"),
        ({"fps": 1000}, "fps", "fps is 1000"),
        ({"size": "30x30"}, "size", "expected a multiple of 16"),
        ({"input_reference": {"file_id": "x"}}, "input_reference", "image_url"),
        ({"input_reference": "nowhere.png"}, "input_reference", "expected data:"),
    ],
)
def test_wrong_requests_are_refused_by_name(ready, fields, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ready.client().post("/videos", body={"prompt": "tile", **fields}, cast_to=object)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def ready():
    with serving(ScriptedBackend, make_diffusion=lambda: fake_backend(max_frames=33, takes_image=True)) as running:
        running.client().images.generate(prompt="warm")
        yield running


def test_a_model_of_stills_makes_no_video():
    with serving(ScriptedBackend, make_diffusion=fake_backend) as running:
        running.client().images.generate(prompt="warm")
        with pytest.raises(openai.BadRequestError, match="makes images, not videos"):
            running.client().videos.create(prompt="tile")


def test_the_first_video_that_cannot_be_made_is_refused(serve):
    """No process has started by then, and none knows the limits."""
    client = (running := serve()).client()
    with pytest.raises(openai.BadRequestError, match="width is 33, expected a multiple of 16"):
        client.videos.create(prompt="a tile", size="33x16")
    with pytest.raises(openai.BadRequestError, match="num_frames is 34, expected an integer from 1 to 33"):
        client.videos.create(prompt="a tile", extra_body={"num_frames": "34"})
    assert not client.videos.list().data and metric(running, "tilewright_pictures_waiting") == 0


def test_a_video_of_a_model_that_cannot_be_loaded(serve):
    client = serve(refuses="it is no model").client()
    for _ in range(2):  # each tries again
        with pytest.raises(openai.InternalServerError, match="the diffusion worker cannot be started") as caught:
            client.videos.create(prompt="a tile")
        assert caught.value.status_code == 503
    assert not client.videos.list().data
