"""/v1/images over HTTP, with OpenAI's client, in front of a process that makes fake images."""

import base64
import contextlib
import http.client
import io
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from conftest import ScriptedBackend, serving
from fake_diffusion import NAME, fake_backend
from page_browser import png
from PIL import Image
from soak import bomb
from test_guard import AMBIGUOUS, error_of, send

from tilewright.outputs.images import settings_of
from tilewright.process import supervisor
from tilewright.server.http.bodies import parse_multipart
from tilewright.server.http.errors import ApiError
from tilewright.server.http.settings import ServerSettings

WAIT_S = 60


@pytest.fixture
def serve():
    """Makes servers for chat and images: serve(gate, settings, max_queue, **options of the fake) -> Running."""
    with contextlib.ExitStack() as stack:

        def make(gate=None, settings=None, max_queue=16, **options):
            return stack.enter_context(
                serving(
                    ScriptedBackend, settings, make_diffusion=lambda: fake_backend(gate, max_queue=max_queue, **options)
                )
            )

        yield make


@pytest.fixture(scope="module")
def ready():
    """A server whose images come at once; one for all tests that only ask."""
    with serving(ScriptedBackend, make_diffusion=lambda: fake_backend(takes_image=True)) as running:
        running.client().images.generate(prompt="warm")
        yield running


@pytest.fixture(scope="module")
def plain():
    """The same, for a model that accepts text only."""
    with serving(ScriptedBackend, make_diffusion=fake_backend) as running:
        running.client().images.generate(prompt="warm")
        yield running


def image(data):
    return Image.open(io.BytesIO(base64.b64decode(data)))


def metric(running, name):
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=WAIT_S) as response:
        values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    return float(values[name])


def until(holds):
    ends = threading.Event()
    for _ in range(WAIT_S * 50):
        if holds():
            return
        ends.wait(0.02)
    raise AssertionError("it does not hold")


def test_images_of_a_prompt(ready):
    answer = ready.client().images.generate(
        model=NAME,
        prompt="a red tile",
        n=2,
        size="32x16",
        extra_body={"seed": 7, "steps": 3, "negative_prompt": "blue"},
    )
    assert answer.size == "32x16" and answer.output_format == "png" and answer.created > 0
    first, second = answer.data
    assert image(first.b64_json).size == (32, 16) and first.b64_json != second.b64_json
    assert first.settings["seed"] == 7 and first.settings["num_steps"] == 3 and first.settings["prompt"] == "a red tile"
    assert settings_of(base64.b64decode(second.b64_json))["seed"] == 8
    assert answer.timings["step_s"] == pytest.approx(0.1) and answer.timings["total_s"] > 0
    again = ready.client().images.generate(prompt="a red tile", size="32x16", extra_body={"seed": 8})
    assert np.array_equal(image(again.data[0].b64_json), image(second.b64_json))


def test_formats_and_sizes(ready):
    client = ready.client()
    for name in ("jpeg", "webp", "png"):
        answer = client.images.generate(prompt="tile", output_format=name, size="auto", output_compression=50)
        assert image(answer.data[0].b64_json).format == name.upper()
        assert image(answer.data[0].b64_json).size == (64, 48)


def test_a_stream_has_previews_and_the_image(ready):
    events = list(ready.client().images.generate(prompt="tile", stream=True, partial_images=3, extra_body={"seed": 1}))
    assert [event.type for event in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:3]] == [0, 1, 2]
    assert [event.step for event in events[:3]] == [1, 2, 3] and events[0].num_steps == 4
    assert image(events[0].b64_json).format == "JPEG" == events[0].output_format.upper()
    assert image(events[-1].b64_json).size == (64, 48) and events[-1].size == "64x48"
    assert events[-1].settings["seed"] == 1


def test_progress_is_told_on_request(ready):
    events = list(
        ready.client().images.generate(prompt="tile", stream=True, n=2, extra_body={"progress": True, "steps": 2})
    )
    told = [event for event in events if event.type == "image_generation.progress"]
    assert [event.step for event in told if event.status == "in_progress"] == [0, 1, 2]
    began = next(event for event in told if event.status == "in_progress")
    assert (began.expected_s, began.expected_from) == (1.0, "as FakeDiffusion says")
    assert told[0].status == "queued"
    assert [event.image_index for event in events if event.type == "image_generation.completed"] == [0, 1]


def test_an_image_by_url(serve):
    running = serve(settings=ServerSettings(api_keys=("secret",)))
    client = running.client(api_key="secret")
    answer = client.images.generate(prompt="tile", response_format="url", output_format="webp")
    url = answer.data[0].url
    assert url.startswith(f"{running.url}/made/") and len(url.rsplit("/")[-1]) > 30
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:  # the name is as good as a key
        assert (
            response.headers["content-type"] == "image/webp" and response.headers["x-content-type-options"] == "nosniff"
        )
        assert Image.open(io.BytesIO(response.read())).format == "WEBP"
    behind_tls = client.with_options(default_headers={"x-forwarded-proto": "https"})
    answer = behind_tls.images.generate(prompt="tile", response_format="url")
    assert answer.data[0].url.startswith(f"{running.url.replace('http:', 'https:')}/made/")
    store = running.handler.diffusion.results
    assert store.size_bytes > 0
    running.loop.call_soon_threadsafe(store._expire)  # nothing is due yet
    for name in list(store._kept):
        running.loop.call_soon_threadsafe(store.drop, name)
    until(lambda: store.size_bytes == 0)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=WAIT_S)
    assert caught.value.code == 404 and "not kept any more" in caught.value.read().decode()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"size": "33x16"}, "size", "width is 33, expected a multiple of 16"),
        ({"size": "8x16"}, "size", "width is 8, expected an integer from 16 to 1024"),
        ({"size": "4096x16"}, "size", "expected an integer from 16 to 1024"),
        ({"size": "1024x1024"}, "size", "1048576 pixels, expected at most 262144: 512 x 512, say"),
        ({"size": "large"}, "size", "size is 'large', expected such as"),
        ({"steps": 51}, "steps", "steps is 51, expected an integer from 1 to 50"),
        ({"steps": 0}, "steps", "steps is 0"),
        ({"num_inference_steps": 99}, "steps", "steps is 99"),
        ({"guidance": 1000}, "guidance", "guidance is 1000"),
        ({"guidance": -1}, "guidance", "guidance is -1"),
        ({"guidance_interval": [0.5, 0.2]}, "guidance_interval", "is 0.5 to 0.2, expected the smaller first"),
        ({"guidance_interval": [0.5]}, "guidance_interval", "at least 2 items"),
        ({"step_cache": 2}, "step_cache", "step_cache is 2"),
        ({"n": 5}, "n", "n is 5, expected an integer from 1 to 4"),
        ({"n": 0}, "n", "n is 0"),
        ({"seed": -1}, "seed", "seed is -1"),
        ({"prompt": "x" * 20_001}, "prompt", "prompt is"),
        ({"prompt": "too long"}, "prompt", "900 tokens, expected at most 16"),
        ({"prompt": ""}, "prompt", "prompt is ''"),
        ({"prompt": 7}, "prompt", "prompt is 7"),
        ({"output_format": "gif"}, "output_format", "output_format is 'gif'"),
        ({"response_format": "file"}, "response_format", "response_format is 'file'"),
        ({"background": "transparent"}, "background", "images are opaque"),
        ({"partial_images": 4, "stream": True}, "partial_images", "partial_images is 4"),
        ({"partial_images": 1}, "partial_images", "expected stream"),
    ],
)
def test_wrong_requests_are_refused_by_name(plain, fields, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        plain.client().post("/images/generations", body={"prompt": "tile", **fields}, cast_to=object)
    assert caught.value.param == param
    assert metric(plain, "tilewright_pictures_running") == 0


def test_what_saves_time_is_passed_on_and_told(ready):
    client = ready.client()
    savings = {"guidance_interval": [0, 0.5], "guidance_norm": 2, "step_cache": 0.25, "guidance": 3}
    (made,) = client.images.generate(prompt="tile", extra_body=savings).data
    told = {name: made.settings[name] for name in savings}
    assert told == {"guidance_interval": [0.0, 0.5], "guidance_norm": 2.0, "step_cache": 0.25, "guidance": 3.0}
    file = ("tile.png", base64.b64decode(made.b64_json))
    (edited,) = client.images.edit(image=file, prompt="tile", extra_body={"guidance_interval": "0-0.5"}).data
    assert edited.settings["guidance_interval"] == [0.0, 0.5]


def test_models_and_their_abilities(ready, scripted):
    chat, drawing = ready.client().models.list().data
    assert chat.id == "scripted" and chat.output_modalities == ["text"]
    assert (
        drawing.id == NAME and drawing.output_modalities == ["image"] and drawing.input_modalities == ["text", "image"]
    )
    assert drawing.limits["default_size"] == "64x48" and drawing.limits["max_steps"] == 50
    assert ready.client().models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="makes images only"):
        ready.client().chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError, match="makes no images here"):
        ready.client().images.generate(model="scripted", prompt="tile")
    running, _ = scripted()
    assert [model.id for model in running.client().models.list()] == ["scripted"]
    with pytest.raises(openai.NotFoundError, match="--image-model"):
        running.client().images.generate(prompt="tile")


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_image_that_cannot_be_made_is_refused(stream):
    """Before the model's process has started nobody knows its sizes."""
    with serving(lambda: None, make_diffusion=fake_backend) as running:
        with pytest.raises(openai.BadRequestError, match="width is 33, expected a multiple of 16"):
            running.client().images.generate(prompt="tile", size="33x16", stream=stream)
        events = running.client().images.generate(prompt="tile", size="32x16", stream=True)
        assert [event.type for event in events][-1] == "image_generation.completed"


def test_images_only():
    with serving(lambda: None, make_diffusion=fake_backend) as running:
        assert urllib.request.urlopen(f"{running.url}/health", timeout=WAIT_S).status == 200
        (model,) = running.client().models.list().data
        assert model.id == NAME and model.limits is None and running.handler.served.image_models[0].backend.pid is None
        with pytest.raises(openai.NotFoundError, match="makes images only"):
            running.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        assert metric(running, "tilewright_picture_worker_ready") == 0
        assert running.client().images.generate(prompt="tile").data
        assert metric(running, "tilewright_picture_worker_ready") == metric(running, "tilewright_pictures_total") == 1
        assert metric(running, "tilewright_picture_step_seconds_count") == 3


@pytest.mark.parametrize("path", ["/v1/images/edits", "/v1/videos"])
def test_bodies_that_may_be_forms_are_parsed_as_all_others(ready, path):
    for body, words in AMBIGUOUS:
        status, _, text = send(ready.url + path, body)
        assert status == 400 and error_of(text)["message"].startswith(words)
    status, _, text = send(ready.url + path, {"prompt": "more", "seed": "3"})  # of a form it is the number 3
    assert status == 400 and error_of(text)["code"] == "invalid_type"


def test_edits_take_a_form_or_a_url(ready):
    client = ready.client()
    red = png(20, 20, "#ff0000")
    answer = client.images.edit(image=("red.png", red), prompt="more", size="16x16", extra_body={"seed": "3"})
    assert np.asarray(image(answer.data[0].b64_json))[0, 0].tolist() == [255, 0, 0]
    assert answer.data[0].settings["seed"] == 3
    url = f"data:image/png;base64,{base64.b64encode(red).decode()}"
    for fields in ({"image": url}, {"images": [{"image_url": url}]}):
        answer = client.post("/images/edits", body={"prompt": "more", **fields}, cast_to=object)
        assert np.asarray(image(answer["data"][0]["b64_json"]))[0, 0].tolist() == [255, 0, 0]
    events = list(client.images.edit(image=red, prompt="more", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "image", "image is missing"),
        ({"image": "http://127.0.0.1:9/x.png"}, "image", "private|not public|not allowed|address"),
        ({"image": "file:///etc/hostname"}, "image", "file"),
        ({"image": "data:image/png;base64,!!!"}, "image", "base64"),
        ({"image": f"data:image/png;base64,{base64.b64encode(bomb()).decode()}"}, "image", "image 1"),
        ({"image": "data:image/png;base64,AAAA"}, "image", "not an image"),
        ({"image": ["data:,a", "data:,b"]}, "image", "expected one"),
        ({"images": [{"file_id": "x"}]}, "images", "image_url"),
        ({"image": "data:,a", "mask": "data:,b"}, "mask", "mask"),
    ],
)
def test_images_to_edit_pass_the_gate(ready, fields, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ready.client().post("/images/edits", body={"prompt": "more", **fields}, cast_to=object)
    assert caught.value.param == param


def test_a_model_that_cannot_edit_says_so(plain):
    with pytest.raises(openai.BadRequestError, match="fake-draw cannot edit") as caught:
        plain.client().images.edit(image=png(), prompt="more")
    assert caught.value.param == "image"


def test_a_killed_worker_gives_a_503_and_another_one_works(serve, gate):
    running = serve(gate)
    client = running.client()
    with ThreadPoolExecutor(2) as pool:
        stream = client.images.generate(prompt="tile", stream=True, extra_body={"progress": True})
        next(event for event in stream if event.status == "in_progress")
        waiting = pool.submit(lambda: client.images.generate(prompt="tile"))
        until(lambda: metric(running, "tilewright_pictures_waiting") == 1)
        os.kill(running.handler.served.image_models[0].backend.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"the diffusion worker ended \(signal SIGKILL\)"):
            list(stream)
        gate.open(4)
        assert waiting.result(WAIT_S).data  # it waited for the new one
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(lambda: client.images.generate(prompt="crash"))
        gate.open(2)
        with pytest.raises(openai.InternalServerError, match="restarted") as caught:
            lost.result(WAIT_S)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    gate.open(4)
    assert client.images.generate(prompt="tile").data
    assert metric(running, "tilewright_picture_worker_restarts_total") == 2
    assert client.chat.completions.create(model="", messages=[{"role": "user", "content": "hi"}]).choices


def health(running):
    with urllib.request.urlopen(f"{running.url}/health", timeout=WAIT_S) as response:  # any other status raises
        return json.load(response)


def test_a_stopped_worker_is_told_of_and_loses_nothing(serve, gate, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_STOPPED_S", 0.1)
    running = serve(gate)
    client, worker = running.client(), running.handler.served.image_models[0].backend
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(lambda: client.images.generate(prompt="tile"))
        until(lambda: metric(running, "tilewright_pictures_running") == 1)
        assert health(running) == {"status": "ok", "replicas": 1}
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            until(lambda: "is stopped" in health(running).get("pictures", ""))  # and chat is served
            with pytest.raises(openai.InternalServerError, match="is stopped; try again later") as caught:
                client.images.generate(prompt="tile")
            assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        gate.open(4)
        assert early.result(WAIT_S).data
    assert health(running) == {"status": "ok", "replicas": 1}


def test_an_internal_error_tells_nothing(plain):
    with pytest.raises(openai.InternalServerError, match="the server's log has the reason") as caught:
        plain.client().images.generate(prompt="fail")
    assert caught.value.status_code == 500 and "secret" not in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="not enough memory"):
        plain.client().images.generate(prompt="no memory")


def test_a_full_queue_is_a_429(serve, gate):
    running = serve(gate, max_queue=1)
    client = running.client()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: client.images.generate(prompt="one"))
        until(lambda: metric(running, "tilewright_pictures_running") == 1)
        second = pool.submit(lambda: client.images.generate(prompt="two"))
        until(lambda: metric(running, "tilewright_pictures_waiting") == 1)
        for refused in (lambda: client.images.generate(prompt="x"), lambda: client.videos.create(prompt="x")):
            with pytest.raises(openai.RateLimitError, match="the limit is 1") as caught:
                refused()
            assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
        # Chat is not behind it.
        assert client.chat.completions.create(model="", messages=[{"role": "user", "content": "hi"}]).choices
        gate.open(8)
        assert first.result(WAIT_S).data and second.result(WAIT_S).data
    assert metric(running, "tilewright_requests_refused_total") == 1  # the video was refused before it was queued


def test_a_client_that_leaves_cancels_its_image(serve, gate):
    running = serve(gate)
    port = int(running.url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": "tile", "steps": 50, "stream": True, "progress": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", "/v1/images/generations", body, {"content-type": "application/json"})
    response = connection.getresponse()
    gate.open(1)
    while b'"step":1' not in response.readline():
        pass
    connection.sock.close() if connection.sock else response.close()
    response.close()
    until(lambda: metric(running, "tilewright_pictures_cancelled_total") == 1)
    assert metric(running, "tilewright_pictures_running") == 1  # until the step that it is in ends
    gate.open_until(lambda: metric(running, "tilewright_pictures_running") == 0)
    assert metric(running, "tilewright_pictures_total") == 0
    gate.open(4)
    assert running.client().images.generate(prompt="tile").data


def test_what_takes_longer_than_a_request_may_is_refused_at_once(serve, gate):
    """The first step of an image waits for the gate: nothing is answered because it was made."""
    running = serve(gate, ServerSettings(request_timeout_s=20.0))
    client = running.client(max_retries=0)
    message = (
        r"size: 512x256 takes about 85 s here \(as FakeDiffusion says\), longer than the 20 s that this server allows "
        r"a request \(--request-timeout\); the largest that fit are 240x128 or 160x160$"
    )
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.images.generate(prompt="tile", size="512x256", **more)
        assert (caught.value.param, caught.value.code) == ("size", "takes_too_long")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.images.generate, prompt="tile", extra_body={"steps": 24})
        until(lambda: metric(running, "tilewright_pictures_running") == 1)
        second = pool.submit(client.images.generate, prompt="tile", extra_body={"steps": 10})
        until(lambda: metric(running, "tilewright_pictures_waiting") == 1)
        with pytest.raises(openai.RateLimitError, match=r"take about 1\d s, and it takes about 10 s") as queued:
            client.images.generate(prompt="tile", extra_body={"steps": 20})
        assert queued.value.code == "queue_too_long" and 0 < int(queued.value.response.headers["retry-after"]) <= 7
        gate.open(24 + 10)
        assert first.result(WAIT_S).data and second.result(WAIT_S).data


def test_the_timeout_and_the_end_of_the_server(serve, gate):
    running = serve(gate, ServerSettings(request_timeout_s=2.0))
    with pytest.raises(openai.InternalServerError, match="took longer than 2 s") as caught:
        running.client().images.generate(prompt="tile", extra_body={"steps": 2})
    assert caught.value.status_code == 504
    gate.open(1)  # ends the cancelled one
    with ThreadPoolExecutor(1) as pool:
        other = serve(gate)
        waiting = pool.submit(lambda: other.client().images.generate(prompt="tile"))
        until(lambda: metric(other, "tilewright_pictures_running") == 1)
        other.loop.call_soon_threadsafe(other.handler.shut_down)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
            waiting.result(WAIT_S)
    assert caught.value.code == "server_ending"


def form(*parts, boundary="b"):
    lines = b"".join(
        b"--b\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts
    )
    return lines + b"--b--\r\n"


def test_forms():
    body = form((b'name="prompt"', "blåbær".encode()), (b'name="image"; filename="a.png"', b"\r\n--not\x00"))
    prompt, image = parse_multipart(body, 'multipart/form-data; boundary="b"')
    assert (prompt.name, prompt.text, prompt.filename) == ("prompt", "blåbær", None)
    assert (image.name, image.data, image.filename) == ("image", b"\r\n--not\x00", "a.png")
    assert parse_multipart(b"--b--", "multipart/form-data; boundary=b") == []


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form((b'name="a"', b"1")), "multipart/form-data"),
        (b"", "multipart/form-data; boundary=b"),
        (b"--b", "multipart/form-data; boundary=b"),
        (b"--b\r\n", "multipart/form-data; boundary=b"),
        (form((b'name="a"', b"1"))[:-9], "multipart/form-data; boundary=b"),
        (form((b'filename="a"', b"1")), "multipart/form-data; boundary=b"),
        (b"--b\r\nname\r\n--b--", "multipart/form-data; boundary=b"),
        (form(*[(b'name="a"', b"1")] * 65), "multipart/form-data; boundary=b"),
    ],
)
def test_forms_that_are_none(body, content_type):
    with pytest.raises(ApiError, match="not multipart/form-data") as caught:
        parse_multipart(body, content_type)
    assert caught.value.status == 400


def test_bodies_of_other_types(ready):
    for body, kind in (
        (b"", "application/json"),
        (b"[1]", "application/json"),
        (b"{", "text/plain"),
        (b"x", "multipart/form-data"),
    ):
        request = urllib.request.Request(f"{ready.url}/v1/images/edits", body, {"content-type": kind})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=WAIT_S)
        assert caught.value.code == 400 and "error" in json.loads(caught.value.read())
