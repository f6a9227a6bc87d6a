"""Patches and features in the place of pictures: the same answers, without the processor and without the encoder."""

import numpy as np
import pytest
import torch
from PIL import Image

from tilewright import Engine
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.inputs.messages import normalize
from tilewright.models.protocol import MediaBatch, MediaItem
from tilewright.types import RequestError
from tilewright.weights import embedded

OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 3}


@pytest.fixture(scope="module")
def engine():
    with Engine(max_context=1024, kv_memory=64 << 20, pack_cache=False, prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def picture():
    return Image.open(embedded.demo_file("demo.png")).convert("RGB")


@pytest.fixture(scope="module")
def prepared(engine, picture):
    """Patches and features of the picture, and its grid."""
    processor = engine.loaded.processor
    medium = processor._prepare(MediaPart("image", "image 1", picture))
    patches = torch.empty(
        medium.num_rows, processor.media_buffer.rows.shape[1], dtype=processor.media_buffer.rows.dtype
    )
    medium.write(patches)
    count = medium.num_rows // processor.image.merge_size**2
    item = MediaItem("image", medium.grid, (1, 1), 0, medium.num_rows, count)
    with torch.inference_mode():
        (features,) = engine.loaded.model.encode(MediaBatch(patches, (item,)))
    return patches, features.clone(), medium.grid


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def told(engine, *parts):
    """An answer's tokens with the likeliest others: another picture changes the numbers, if not the words."""
    answer = engine.chat(asked(*parts), **OPTIONS)
    return answer.token_ids, answer.logprobs


def counted(engine, monkeypatch):
    """How many media the encoder is given from here on."""
    model, seen = engine.loaded.model, []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda batch: seen.extend(batch.items) or encode(batch))
    return seen


@pytest.mark.parametrize("kind", ["pixel_values", "image_features"])
@pytest.mark.parametrize("as_array", [False, True])
def test_the_answer_is_that_of_the_picture(kind, as_array, engine, picture, prepared, monkeypatch):
    patches, features, grid = prepared
    values = patches if kind == "pixel_values" else features
    expected = told(engine, {"type": "image", "image": picture})
    engine.loop.core.resources.media.features.clear()
    seen = counted(engine, monkeypatch)
    part = {"type": kind, kind: values.float().numpy() if as_array else values, "grid": np.array(grid)}
    assert told(engine, part) == expected
    assert len(seen) == (kind == "pixel_values")


def test_beside_other_pictures(engine, picture, prepared):
    _, features, grid = prepared
    other = picture.rotate(180)
    image, turned = {"type": "image", "image": picture}, {"type": "image", "image": other}
    given = {"type": "image_features", "image_features": features, "grid": grid}
    expected = told(engine, turned, image, turned)
    engine.loop.core.resources.media.features.clear()
    assert told(engine, turned, given, turned) == expected


def test_known_by_what_they_are(engine, prepared):
    """Other values of the same grid are not taken for those that are cached."""
    _, features, grid = prepared
    part = {"type": "image_features", "image_features": features, "grid": grid}
    first = told(engine, part)
    assert told(engine, {**part, "image_features": features.roll(1, 0)}) != first
    assert told(engine, part) == first


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_features": "a picture"}, "dtype is None, expected bfloat16, float16, float32"),
        ({"image_features": "AAAA", "dtype": "bfloat16", "shape": [1, 2]}, "has 3 bytes, expected 4: shape"),
        ({"image_features": "A?A=", "dtype": "float16", "shape": [1, 1]}, "image_features is not base64"),
        ({"image_features": bytes(12), "dtype": "float32", "shape": [1, 3]}, r"has the shape \[1, 3\], expected \["),
        ({"image_features": bytes(12), "dtype": "int8", "shape": [1, 12]}, "dtype is 'int8', expected bfloat16"),
        ({"image_features": bytes(12), "dtype": "float32", "shape": [3]}, r"shape is \[3\], expected \[rows, width\]"),
        ({"image_features": {1, 2}}, "image_features is a set, expected a tensor or array"),
        ({"key": "abc"}, "key is 'abc', expected 32 hexadecimal digits"),
        ({"key": "0" * 32}, "key is 0{32}, but the checksum of image_features is [0-9a-f]{32}"),
        ({"tiling": (1, 2)}, "this model does not tile images"),
        ({"times_s": [0.5]}, "times_s has 1 entries, expected 0"),
        ({"times_s": [1.0, 0.5]}, "expected seconds in order"),
        ({"image_features": torch.ones(15, 7)}, r"has the shape \[15, 7\], expected \["),
        ({"image_features": torch.ones(15, 7, dtype=torch.int32)}, r"int32 of shape \[15, 7\], expected real numbers"),
        ({"image_features": None}, "expected a tensor or array"),
        ({"grid": (1, 6)}, r"grid is \(1, 6\), expected \(1, rows, columns\)"),
        ({"grid": (1, 6, 0)}, r"grid is \(1, 6, 0\), expected"),
        ({"grid": (1, 5, 10)}, "rows and columns that 2 divides"),
        ({"grid": (2, 6, 10)}, "expected 1 frame"),
        ({"grid": (1, 1 << 20, 1 << 20)}, "the limit is"),
    ],
)
def test_what_is_refused(changed, message, engine, prepared):
    _, features, grid = prepared
    part = {"type": "image_features", "image_features": features, "grid": grid, **changed}
    with pytest.raises(RequestError, match=message):
        engine.chat(asked(part), **OPTIONS)


def test_values_that_are_no_numbers(engine, prepared):
    patches, _, grid = prepared
    part = {"type": "pixel_values", "pixel_values": torch.full_like(patches, torch.nan), "grid": grid}
    with pytest.raises(RequestError, match="image 1: pixel_values has values that are not finite"):
        engine.chat(asked(part), **OPTIONS)
    too_large = torch.full(patches.shape, torch.finfo(torch.float32).max)  # for bf16
    with pytest.raises(RequestError, match="image 1: pixel_values has values that are not finite"):
        engine.chat(asked({**part, "pixel_values": too_large}), **OPTIONS)


def test_servers_take_none():
    from tilewright.server.http.settings import MEDIA_LIMITS

    assert not MEDIA_LIMITS.allow_precomputed and MediaLimits().allow_precomputed
    part = {"type": "image_features", "image_features": [[0.0]], "grid": [1, 2, 2]}
    with pytest.raises(RequestError, match="image 1: image_features are accepted with --allow-precomputed only"):
        normalize(asked(part), limits=MEDIA_LIMITS)
