"""Features and patches over HTTP: off unless allowed, equal to the picture's answer, and bounded as media are."""

import asyncio
import base64
import dataclasses
import io
import json
import random

import numpy as np
import openai
import pytest
import torch
from conftest import serving
from PIL import Image
from serve_process import ServerProcess
from tiny_checkpoint import write_vision_model

from tilewright.engine.engine import Engine
from tilewright.inputs.media import MediaLimits
from tilewright.inputs.precomputed_values import as_json
from tilewright.server.http.settings import MEDIA_LIMITS, ServerSettings
from tilewright.server.link.remote import LocalBackend
from tilewright.server.media.gate import MediaGate, MediaPolicy
from tilewright.types import RequestError

ALLOWED = dataclasses.replace(MEDIA_LIMITS, allow_precomputed=True)
TEXT = {"type": "text", "text": "what?"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_vision_model(tmp_path_factory.mktemp("vision"))
    options = {"pack_cache": False, "kv_memory": "64MB", "max_sequences": 8, "media_limits": ALLOWED}
    with Engine(folder, dtype="bfloat16", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    settings = ServerSettings(media=MediaPolicy(ALLOWED), max_held_bytes=1 << 20)
    with serving(lambda: LocalBackend(engine), settings) as running:
        yield running


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(np.random.default_rng(5).integers(0, 255, (40, 24, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def features(engine, picture):
    return as_json(engine.features({"type": "image", "image": picture}))


def patches(engine, picture):
    described = engine.loaded.processor.describe({"type": "image", "image": picture})
    rows = torch.empty(described.num_rows, engine.loaded.processor.media_buffer.shape[1], dtype=engine.loaded.dtype)
    described.write(rows)
    return as_json({"type": "pixel_values", "pixel_values": rows, "grid": described.grid})


def ask(server, *parts, **options):
    answer = server.client().chat.completions.create(
        model="", messages=[{"role": "user", "content": [*parts, TEXT]}], max_tokens=8, temperature=0, logprobs=True,
        top_logprobs=3, extra_body={"ignore_eos": True}, **options,
    )  # fmt: skip
    return answer


def told(answer):
    (choice,) = answer.choices
    return choice.message.content, choice.logprobs.content


def picture_part(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_the_answer_is_that_of_the_picture(server, engine, picture, features, monkeypatch):
    expected = told(ask(server, picture_part(picture)))
    assert told(ask(server, patches(engine, picture))) == expected
    monkeypatch.setattr(engine.loaded.model, "encode", lambda batch: pytest.fail("the encoder was asked"))
    engine.loop.core.resources.media.features.clear()
    assert told(ask(server, features)) == expected
    turned = as_json({**features, "image_features": as_tensor(features).flip(0), "key": None})
    assert told(ask(server, turned)) != expected


def as_tensor(part):
    data = base64.b64decode(part["image_features"])
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, part["dtype"])).view(part["shape"])


def test_caches_know_equal_values(server, engine, picture):
    """Those of a wider dtype too; never a picture by its features."""
    part = engine.features({"type": "image", "image": picture.rotate(90)})
    long = {"type": "text", "text": "x" * 64}

    def num_cached(*parts):
        return ask(server, *parts, long).usage.prompt_tokens_details.cached_tokens

    base = num_cached(picture_part(picture.rotate(90)))
    assert num_cached(as_json(part)) == base
    assert num_cached(as_json(part)) > base
    assert num_cached({**as_json(part | {"image_features": part["image_features"].float()}), "key": None}) > base
    assert num_cached({**as_json(part | {"image_features": part["image_features"] * 2}), "key": None}) == base


def test_they_are_off_unless_allowed(vision_server, features):
    with pytest.raises(openai.BadRequestError) as error:
        ask(vision_server, features)
    expected = "image 1: image_features are accepted with --allow-precomputed only: send the image"
    assert error.value.body["message"] == expected


def test_the_flag(tmp_path, engine, picture, features):
    folder = write_vision_model(tmp_path)
    process = ServerProcess(folder, "--allow-precomputed", "--dtype", "bfloat16")
    try:
        assert told(ask(process, features)) == told(ask(process, picture_part(picture)))
    finally:
        process.end()


NUMBERS = [[0.5] * 8] * 15


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_features": NUMBERS}, "image 1: image_features is a list, expected base64 of its bytes, dtype"),
        ({"image_features": None}, "image 1: image_features is a NoneType, expected base64 of its bytes"),
        ({"image_features": {"url": "http://x"}}, "image 1: image_features is a dict, expected base64"),
        ({"image_features": ""}, "image 1: image_features has 0 bytes, expected "),
        ({"image_features": "AAAA"}, "image 1: image_features has 3 bytes, expected "),
        ({"dtype": None}, "image 1: dtype is None, expected bfloat16, float16, float32"),
        ({"dtype": "float64"}, "image 1: dtype is 'float64', expected bfloat16, float16, float32"),
        ({"dtype": ["float32"]}, "image 1: dtype is ['float32'], expected bfloat16"),
        ({"dtype": "float32"}, "bytes, expected "),
        ({"shape": [15]}, "image 1: shape is [15], expected [rows, width]"),
        ({"shape": [-15, 8]}, "image 1: shape is [-15, 8], expected [rows, width]"),
        ({"shape": [15.0, 8]}, "image 1: shape is [15.0, 8], expected [rows, width]"),
        ({"shape": [1 << 20, 1 << 20]}, "bytes, the limit is 67108864"),
        ({"shape": [10**4000, 1]}, "expected [rows, width]"),
        ({"grid": [1, 6]}, "image 1: grid is [1, 6], expected (1, rows, columns) of patches"),
        ({"grid": [1, 10**4000, 1]}, "expected (1, rows, columns) of patches"),
        ({"grid": [1, 3, 20]}, "expected rows and columns that 2 divides"),
        ({"grid": [1, 4, 4]}, "for a grid of (1, 4, 4)"),
        ({"grid": [2, 10, 6]}, "image 1: grid is (2, 10, 6), expected 1 frame"),
        ({"grid": [1, 1 << 16, 1 << 16]}, "pixels, the limit is 67108864"),
        ({"key": 7}, "image 1: key is 7, expected 32 hexadecimal digits"),
        ({"key": "f" * 32}, f"image 1: key is {'f' * 32}, but the checksum of image_features is "),
        ({"tiling": [1, 2]}, "this model does not tile images"),
        ({"times_s": "soon"}, "times_s is 'soon', expected seconds in order"),
        ({"type": "audio_features", "audio_features": "AAAA", "dtype": "float16", "shape": [1, 1]}, "audio 1: "),
    ],
)  # fmt: skip
def test_what_is_refused(changed, message, server, features):
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, {**features, **changed})
    assert message in error.value.body["message"]
    assert len(error.value.body["message"]) < 300


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers(value, server, features):
    values = as_tensor(features).clone()
    values[3, 5] = value
    with pytest.raises(openai.BadRequestError, match="image 1: image_features has values that are not finite"):
        ask(server, {**as_json({**features, "image_features": values}), "key": None})


def test_the_budget_of_all_requests_counts_them(server, features):
    """Sizes alone decide: no such grid is there, and nobody gets to look."""
    part = {"type": "image_features", "dtype": "float32", "shape": [1, 1 << 18], "grid": [1, 2, 2]}
    part["image_features"] = base64.b64encode(bytes(1 << 20)).decode()
    with pytest.raises(openai.RateLimitError) as error:
        ask(server, part)
    assert error.value.body["code"] == "memory_full"
    assert ask(server, features).usage.completion_tokens == 8  # what was refused holds nothing


def planned(limits, *parts):
    async def run():
        gate = MediaGate(MediaPolicy(limits))
        held = []
        try:
            messages = await gate.resolve([{"role": "user", "content": list(parts)}], held.append)
            return messages[0]["content"], held
        finally:
            await gate.close()

    return asyncio.run(run())


PART = {
    "type": "image_features", "image_features": base64.b64encode(bytes(range(32))).decode(), "dtype": "bfloat16",
    "shape": [4, 4], "grid": [1, 4, 4],
}  # fmt: skip


def test_the_gate_decodes_and_counts():
    limits = MediaLimits(max_items=3, max_total_bytes=100)
    (part,), held = planned(limits, PART)
    assert part == {**PART, "image_features": bytes(range(32))} and sum(held[:2]) == 32
    with pytest.raises(RequestError, match="image 4: the request has more than 3 images"):
        planned(limits, PART, PART, PART, PART)
    with pytest.raises(RequestError, match="image 3: the request's media are more than 80 bytes"):
        planned(dataclasses.replace(limits, max_total_bytes=80), PART, PART, PART)
    with pytest.raises(RequestError, match="image 1: image_features takes 32 bytes, the limit is 31"):
        planned(dataclasses.replace(limits, max_bytes=31), PART)


def test_nothing_else_comes_of_any_form(server, features):
    """Fields changed, dropped and cut by chance: a sentence that is the client's to read, or an answer."""
    rng, client = random.Random(11), server.client()
    odd = [None, True, -1, 0, 1.5, 2**31, "", "AA==", "é", [], [1], [1, 2, 3], [[1]], {}, {"a": 1}, "bfloat16"]
    statuses = set()
    for _ in range(60):
        part = json.loads(json.dumps(features))
        for key in rng.sample(sorted(part), rng.randint(1, 2)):
            action = rng.randrange(3)
            if action == 0:
                del part[key]
            elif action == 1 and isinstance(part[key], str) and part[key]:
                place = rng.randrange(len(part[key]))
                part[key] = part[key][:place] + rng.choice("A=%\n?") + part[key][place + rng.randrange(2) :]
            else:
                part[key] = rng.choice(odd)
        try:
            client.chat.completions.create(
                model="", messages=[{"role": "user", "content": [part, TEXT]}], max_tokens=1, temperature=0
            )
            statuses.add(200)
        except openai.APIStatusError as error:
            assert error.status_code == 400, (part | {"image_features": ""}, error)
            statuses.add(400)
    assert statuses == {200, 400}
    assert ask(server, features).usage.completion_tokens == 8  # what was refused holds nothing
