"""Requests made from a seed: the same for every server, and none like another."""

import base64
import io
import itertools
import json
import wave

import av
import numpy as np
import pytest
from PIL import Image

from tilewright.bench.serve.workload import WORDS, Workload
from tilewright.types import RequestError


def bodies(count: int = 4, **fields) -> list[dict]:
    return [json.loads(request.body) for request in Workload("m", **fields).requests(range(count))]


def urls(body: dict, kind: str) -> list[str]:
    parts = body["messages"][-1]["content"]
    return [part[kind]["url"] for part in parts if part["type"] == kind]


def opened(url: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(url.partition(",")[2]))


def test_a_seed_makes_the_same_requests():
    fields = {"pictures": 1, "picture_size": (40, 30), "videos": 1, "video_frames": 2, "prompt_tokens": (5, 50)}
    assert list(Workload("m", **fields).requests(range(3))) == list(Workload("m", **fields).requests(range(3)))
    one, other = Workload("m", **fields), Workload("m", seed=1, **fields)
    assert not {request.body for request in one.requests(range(3))} & {r.body for r in other.requests(range(3))}
    # By its number alone: what is made before it does not matter.
    assert list(one.requests([2])) == list(one.requests(range(3)))[2:]


def test_prompts():
    texts = [body["messages"][0]["content"] for body in bodies(40, prompt_tokens=(10, 20))]
    lengths = {len(text.split()) for text in texts}
    assert len(set(texts)) == 40 and min(lengths) >= 10 and max(lengths) <= 20 and len(lengths) > 4
    assert len(set(WORDS)) == len(WORDS)


def test_fields():
    (body,) = bodies(1)
    assert body["max_tokens"] == body["min_tokens"] == 64 and body["ignore_eos"] and body["temperature"] == 0
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["model"] == "m"
    (body,) = bodies(1, is_plain=True)
    assert not body.keys() & {"min_tokens", "ignore_eos"}
    extra = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
    (body,) = bodies(1, extra=extra)
    assert "max_tokens" not in body and body["max_completion_tokens"] == 9 and body["chat_template_kwargs"]
    requests = list(Workload("m", output_tokens=(3, 9)).requests(range(40)))
    assert {request.output_tokens for request in requests} == set(range(3, 10))
    assert all(json.loads(request.body)["max_tokens"] == request.output_tokens for request in requests)


def test_shared_beginnings():
    one, other = bodies(2, shared_prefix_tokens=30, system="Be brief.")
    assert one["messages"][0] == other["messages"][0] and one["messages"][1] != other["messages"][1]
    assert one["messages"][0]["role"] == "system" and len(one["messages"][0]["content"].split()) == 32
    one, other = (body["prompt"].split() for body in bodies(2, endpoint="completions", shared_prefix_tokens=30))
    assert len(one) == 158 and one[:30] == other[:30] and one[30:] != other[30:]


@pytest.mark.parametrize("format", ["jpeg", "png"])
def test_images(format):
    made = bodies(3, pictures=2, picture_size=(96, 64), picture_format=format)
    found = [url for body in made for url in urls(body, "image_url")]
    assert len(set(found)) == 6 and all(url.startswith(f"data:image/{format};base64,") for url in found)
    for url in found:
        image = Image.open(opened(url))
        assert (image.size, image.format) == ((96, 64), format.upper())
        assert len(image.convert("RGB").getcolors(96 * 64)) > 20
    assert all(body["messages"][0]["content"][-1]["type"] == "text" for body in made)


def test_large_images_are_compressible():
    (body,) = bodies(1, pictures=1, picture_size=(512, 512))
    size_bytes = len(opened(urls(body, "image_url")[0]).getvalue())
    assert 4_000 < size_bytes < 512 * 512 * 3 / 10


def test_videos():
    made = bodies(2, videos=1, video_frames=5, video_size=(64, 48))
    found = [urls(body, "video_url")[0] for body in made]
    assert len(set(found)) == 2 and all(url.startswith("data:video/mp4;base64,") for url in found)
    with av.open(opened(found[0])) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 5 and frames[0].shape == (48, 64, 3)
    assert all((one != other).mean() > 0.1 for one, other in itertools.pairwise(frames))


def test_sounds():
    made = bodies(2, sounds=2, sound_seconds=0.8)
    found = [part["input_audio"] for body in made for part in body["messages"][0]["content"] if "input_audio" in part]
    assert len({sound["data"] for sound in found}) == 4 and {sound["format"] for sound in found} == {"wav"}
    with wave.open(io.BytesIO(base64.b64decode(found[0]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (16_000, 1, 12_800)
        samples = np.frombuffer(file.readframes(12_800), "<i2")
    assert 2_000 < np.abs(samples).max() < 30_000


def test_the_same_media():
    made = bodies(3, pictures=2, videos=1, video_frames=2, picture_size=(32, 32), same_media=True)
    for kind, count in (("image_url", 2), ("video_url", 1)):
        assert len({url for body in made for url in urls(body, kind)}) == count
    assert len({body["messages"][0]["content"][-1]["text"] for body in made}) == 3


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"endpoint": "completions", "pictures": 1}, "expected chat"),
        ({"endpoint": "completions", "sounds": 1}, "expected chat"),
        ({"prompt_tokens": (9, 3)}, "--prompt-tokens is 9-3"),
        ({"output_tokens": (0, 3)}, "--output-tokens is 0-3"),
        ({"videos": 1, "video_size": (31, 32)}, "--video-size is 31x32, expected even sides"),
    ],
)
def test_workloads_that_are_none(fields, message):
    with pytest.raises(RequestError, match=message):
        Workload("m", **fields)
