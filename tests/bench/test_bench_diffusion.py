"""`tilewright bench image|video` and `bench serve --images|--make-videos`, from flags to tables and JSON."""

import json

import pytest
from fake_diffusion import FakeDiffusion
from odd_server import OddServer, plain

from tilewright import cli
from tilewright.bench import timing
from tilewright.bench.serve import images
from tilewright.bench.serve import run as sending
from tilewright.engine.measure import machine
from tilewright.flags import diffusion


class Bench(FakeDiffusion):
    """A fake Diffusion as `bench` uses one."""

    def params(self, prompt, **settings):
        return self.limits.params(prompt, **settings)

    def run(self, params, on_step=None):
        return super().run(params, lambda step, num_steps, latents: None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command on a fake model, without waiting for the machine's probes: (status, JSON, text)."""
    monkeypatch.setattr(timing, "probe", lambda: timing.Probe(20.0, 18.0, 1.5, 2.0, "float32"))
    monkeypatch.setattr(machine, "measure", lambda: machine.MeasuredMachine(20.0, 19.0, 11.0, 2.0, 4.0, 0.1))
    monkeypatch.setattr(sending, "measure_limits", lambda: {"machine": {"cpu_model": "a machine"}, "probe": {}})

    def run_command(*arguments, max_frames=1):
        monkeypatch.setattr(diffusion, "open_model", lambda options: Bench(max_frames=max_frames))
        path = tmp_path / "b.json"
        status = cli.main(["bench", *arguments, "--json", str(path)])
        return status, json.loads(path.read_text()) if path.exists() else None, capsys.readouterr()

    return run_command


def test_images(run):
    status, document, said = run("image", "-n", "2", "--steps", "4", "--size", "32x16", "--rounds", "2")
    assert status == 0 and "per minute" in said.out and "matrix product 1.50 TFLOP/s" in said.out
    figures = {name: entry["median"] for name, entry in document["figures"].items()}
    assert figures == pytest.approx(
        {
            "step": 0.1,
            "picture": 0.215,
            "pictures": 60 / 0.215,
            "encode the prompt": 0.01,
            "denoise": 0.4,
            "decode": 0.02,
        }
    )
    assert document["bench"] == "image" and document["settings"]["n"] == 2 and len(document["rounds"]) == 2
    assert document["settings"]["width"] == 32 and document["machine"]["measured"]["read_gb_s"] == 20.0


def test_videos(run):
    status, document, _ = run("video", "-m", ".", "--frames", "9", "--rounds", "1", max_frames=33)
    assert status == 0 and document["figures"]["videos"]["unit"] == "per minute"
    assert document["settings"]["num_frames"] == 9
    status, _, said = run("video", "-m", ".")
    assert status == 2 and "makes images, expected a model that makes videos" in said.err


def test_wrong_flags(run, capsys):
    status, _, said = run("image", "--steps", "51")
    assert status == 2 and "num_steps is 51" in said.err
    with pytest.raises(SystemExit):
        run("image", "--size", "large")


def answering(found, status="200 OK"):
    return plain(json.dumps(found).encode(), status)


def server(found, status="200 OK"):
    """A server with two models that answers every request for images the same."""
    talks, draws = {"id": "talks", "output_modalities": ["text"]}, {"id": "draws", "output_modalities": ["image"]}

    def respond(request):
        return answering({"data": [talks, draws]}) if request.path == "/v1/models" else answering(found, status)

    return OddServer(respond)


def flags(running, *more):
    return ["serve", running.url, "--images", "--requests", "6", "--warmup", "1", "--concurrency", "2", *more]


def test_a_server_of_images(run):
    made = {"data": [{"b64_json": "AA=="}] * 2, "timings": {"step_s": 0.25, "queued_s": 0.5}}
    with server(made) as running:
        more = ("--image-size", "64x32", "--steps", "3", "--images-per-request", "2")
        status, document, said = run(*flags(running, *more))
    assert status == 0 and "6 answered, 0 failed" in said.out and "images a minute" in said.out
    bodies = [request.json() for request in running.requests if request.path == "/v1/images/generations"]
    assert len(bodies) == 7 and {body["model"] for body in bodies} == {"draws"}
    assert len({body["prompt"] for body in bodies}) == 7
    assert {(body["size"], body["steps"], body["n"]) for body in bodies} == {("64x32", 3, 2)}
    assert document["figures"]["step"]["mean"] == 0.25 and document["figures"]["queued"]["count"] == 6
    totals = document["totals"]
    assert totals["num_pictures"] == 12
    assert totals["pictures_per_minute"] == pytest.approx(2 * totals["requests_per_minute"])
    assert document["machine"]["cpu_model"] == "a machine"


def test_servers_that_make_none(run):
    with server({"data": []}) as running:
        status, document, said = run(*flags(running, "--plain"))
    assert status == 1 and "6 failed, malformed" in said.out and document["totals"]["num_answered"] == 0
    assert all("seed" not in request.json() for request in running.requests if request.body)
    with server({"error": {"message": "no"}}, "404 Not Found") as running:
        status, document, said = run(*flags(running))
    assert status == 1 and document["totals"]["failures"] == {"HTTP 404": {"no": 6}}


def video_server(states, error=None):
    """A server whose videos go through the states, one for each time they are asked for."""
    left = {}

    def respond(request):
        method, path = request.method, request.path
        if path == "/v1/models":
            return answering({"data": [{"id": "draws", "output_modalities": ["image"]},
                                       {"id": "films", "output_modalities": ["image", "video"]}]})  # fmt: skip
        if method == "POST":
            number = f"video_{len(left)}"
            left[number] = list(states)
            return answering({"id": number, "status": "queued"})
        number = path.split("/")[3]
        if method == "DELETE":
            del left[number]
            left[f"{number} deleted"] = []
            return answering({"id": number, "deleted": True})
        if path.endswith("/content"):
            return plain(b"a film", "200 OK")
        status = left[number].pop(0)
        timings = {"step_s": 0.25, "queued_s": 0.5} if status == "completed" else None
        return answering({"id": number, "status": status, "timings": timings, "error": error})

    return OddServer(respond), left


def video_flags(running, *more):
    return ["serve", running.url, "--make-videos", "--requests", "3", "--warmup", "1", "--concurrency", "2", *more]


def test_a_server_of_videos(run, monkeypatch):
    monkeypatch.setattr(images, "POLL_S", 0.001)
    server, left = video_server(["queued", "in_progress", "completed"])
    with server as running:
        more = ("--image-size", "64x32", "--steps", "3", "--num-frames", "9")
        status, document, said = run(*video_flags(running, *more))
    assert status == 0 and "3 answered, 0 failed" in said.out and "videos a minute" in said.out
    bodies = [request.json() for request in running.requests if request.method == "POST"]
    assert {(body["model"], body["size"], body["steps"], body["num_frames"]) for body in bodies} == {
        ("films", "64x32", 3, 9)
    }
    assert all("n" not in body for body in bodies) and all(name.endswith("deleted") for name in left)
    assert document["figures"]["step"]["mean"] == 0.25 and document["totals"]["num_pictures"] == 3


def test_videos_that_fail_are_told_and_deleted(run, monkeypatch):
    monkeypatch.setattr(images, "POLL_S", 0.001)
    server, left = video_server(["in_progress", "failed"], {"message": "the worker died"})
    with server as running:
        status, document, _ = run(*video_flags(running))
    assert status == 1 and document["totals"]["failures"] == {"not made": {"the worker died": 3}}
    assert all(name.endswith("deleted") for name in left)


def test_a_video_that_takes_too_long_is_deleted(run, monkeypatch):
    monkeypatch.setattr(images, "POLL_S", 0.001)
    server, left = video_server(["queued"] * 100_000)
    with server as running:
        status, document, _ = run(*video_flags(running, "--timeout-s", "0.2", "--warmup", "0"))
    assert status == 1 and document["totals"]["failures"] == {"timeout": {"no video within 0.2 s": 3}}
    assert all(name.endswith("deleted") for name in left)
