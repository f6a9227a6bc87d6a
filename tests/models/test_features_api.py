"""Features that one engine gives away and another takes in the place of the medium, for each family and kind."""

import numpy as np
import pytest
import tiny_checkpoint
import torch
from asking import picture

import tilewright
from tilewright.inputs.media import MediaLimits
from tilewright.types import RequestError

OPTIONS = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
WRITERS = {
    "qwen3_vl": tiny_checkpoint.write_vision_model,
    "qwen3_5": tiny_checkpoint.write_hybrid_model,
    "mllama": tiny_checkpoint.write_cross_model,
    "omni": tiny_checkpoint.write_omni_model,
}


def image(seed=1, height=20, width=40):
    return {"type": "image", "image": picture(seed, height, width)}


def video(count=8):
    frames = np.random.default_rng(3).integers(0, 255, (count, 32, 32, 3), dtype=np.uint8)
    return {"type": "video", "video": list(frames), "fps": 2}


def sound(seconds=2.5):
    noise = np.random.default_rng(4).normal(0, 0.1, int(seconds * 16000))
    return {"type": "audio", "audio": noise.astype(np.float32)}


CASES = [
    ("qwen3_vl", image()), ("qwen3_vl", video()), ("qwen3_5", image()), ("qwen3_5", video()),
    ("mllama", image(1, 8, 8)), ("mllama", image(1, 40, 14)), ("mllama", image(1, 14, 40)),
    ("omni", image()), ("omni", video(4)), ("omni", sound()), ("omni", sound(0.4)), ("omni", sound(9)),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Engines by family, of which only the one that was asked for last is open."""
    opened = {}

    def get(family):
        if family not in opened:
            for engine in opened.values():
                engine.close()
            opened.clear()
            folder = WRITERS[family](tmp_path_factory.mktemp(family))
            opened[family] = tilewright.Engine(
                folder, dtype="float32", kv_memory="20MB", max_context=1024, pack_cache=False
            )
        return opened[family]

    yield get
    for engine in opened.values():
        engine.close()


def told(engine, *parts):
    text = {"type": "text", "text": "What?"}
    answer = engine.chat([{"role": "user", "content": [*parts, text]}], **OPTIONS)
    return answer.token_ids, answer.logprobs


def forget(engine):
    """Nothing of what was computed is left to be found."""
    media = engine.loop.core.resources.media
    media.features.clear()
    media.cross_cache.clear()


@pytest.mark.parametrize(("family", "medium"), CASES)
def test_the_answer_is_that_of_the_medium(family, medium, engine_of, monkeypatch):
    engine = engine_of(family)
    expected = told(engine, medium)
    part = engine.features(medium)
    kind = medium["type"]
    assert part["type"] == f"{kind}_features" and ("times_s" in part) == (kind == "video")
    assert told(engine, medium) == expected  # nothing was disturbed
    forget(engine)

    def refuse(batch):
        raise AssertionError("the encoder was asked")

    monkeypatch.setattr(engine.loaded.model, "encode", refuse)
    assert told(engine, part) == expected
    assert told(engine, {**part, part["type"]: part[part["type"]] + 1, "key": None})[1] != expected[1]


@pytest.mark.parametrize(("family", "medium"), CASES)
def test_what_the_encoder_reads_may_come_too(family, medium, engine_of):
    """Patches of pictures and videos, and mel frames of sounds."""
    engine = engine_of(family)
    expected = told(engine, medium)
    processor = engine.loaded.processor
    described = processor.describe(medium)
    value_type = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "mel_frames"}[medium["type"]]
    pieces = described.sound or (described,)
    buffer_width, rows, grid = processor.media_buffer.shape[1], [], described.grid
    for piece in pieces:
        values = torch.empty(piece.num_rows, buffer_width)
        piece.write(values)
        width = piece.grid[2] if medium["type"] == "audio" else values.numel() // (np.prod(piece.grid))
        count = piece.grid[1] if medium["type"] == "audio" else np.prod(piece.grid)
        rows.append(values.view(-1)[: count * width].view(count, width))
    if medium["type"] == "audio":
        grid = 1, sum(piece.grid[1] for piece in pieces), grid[2]
    part = {"type": value_type, value_type: torch.cat(rows), "grid": grid, "tiling": described.tiling}
    part["times_s"] = described.times_s
    forget(engine)
    assert told(engine, part) == expected


def test_a_part_is_known_by_its_checksum(engine_of):
    engine = engine_of("qwen3_vl")
    part = engine.features(image())
    damaged = part["image_features"].clone()
    damaged[0, 0] += 1
    with pytest.raises(RequestError, match=r"image 1: key is [0-9a-f]{32}, but the checksum of image_features is"):
        told(engine, {**part, "image_features": damaged})


def test_caches_are_shared_by_equal_values_alone(engine_of):
    """Features never answer for the picture that they are of, nor the picture for them."""
    engine = engine_of("qwen3_vl")
    text = {"type": "text", "text": "x" * 64}

    def num_cached(part):
        return engine.chat([{"role": "user", "content": [part, text]}], **OPTIONS).num_cached_tokens

    medium = image(seed=77)
    first = num_cached(medium)
    assert num_cached(medium) > first
    part = engine.features(medium)
    wide = {**part, "image_features": part["image_features"].double(), "key": None}
    other = {**part, "image_features": part["image_features"] * 1.5, "key": None}
    assert num_cached(part) == first  # what precedes every picture
    assert num_cached(part) > first
    assert num_cached(wide) > first
    assert num_cached(other) == first
    assert num_cached({**part, "type": "pixel_values"} | image(seed=78)) == first


def test_models_say_what_they_take(engine_of):
    part = {"type": "audio_features", "audio_features": torch.ones(3, 4), "grid": (1, 20, 16)}
    engine = engine_of("mllama")
    with pytest.raises(RequestError, match="audio 1: the model accepts text and image"):
        told(engine, part)
    features = engine.features(image(1, 14, 40))
    assert features["tiling"] == (1, 3) and features["grid"] == (3, 4, 4)
    for changed, message in (
        ({"tiling": (2, 2)}, r"grid is \(3, 4, 4\), expected \(4, 4, 4\)"),
        ({"tiling": (3, 2)}, r"tiling is \(3, 2\), expected rows and columns of at most 4 tiles"),
        ({"tiling": 3}, r"tiling is 3, expected \(rows, columns\) of tiles"),
        ({"tiling": (3, 1)}, "key is"),
    ):
        with pytest.raises(RequestError, match=message):
            told(engine, {**features, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"grid": (1, 300, 16)},
            r"has the shape \[33, 96\], expected \[39, 96\] for a grid of \(1, 300, 16\)",
        ),
        ({"grid": (2, 250, 16)}, r"expected \(1, mel frames, 16\)"),
        ({"grid": (1, 250, 8)}, r"grid is \(1, 250, 8\), expected \(1, mel frames, 16\)"),
        ({"grid": (1, 2**31 - 1, 16)}, "seconds, the limit is 3600"),
        ({"times_s": (1.0,)}, "a sound has neither tiling nor times_s"),
    ],
)
def test_sounds_that_are_refused(changed, message, engine_of):
    engine = engine_of("omni")
    with pytest.raises(RequestError, match=message):
        told(engine, {**engine.features(sound()), **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"times_s": (0.5,)}, "times_s has 1 entries, expected 4"),
        ({"times_s": (0.5, 1.5, 2.5, 9999.0)}, "9999.0 seconds, the limit is 3600"),
        ({"times_s": (0.5, 1.5, 2.5, float("nan"))}, "expected seconds in order"),
        ({"use_audio_in_video": True}, "use_audio_in_video is true, but video_features have no sound"),
        ({"grid": (2**31 - 1, 8, 8), "times_s": ()}, "times_s has 0 entries"),
    ],
)
def test_videos_that_are_refused(changed, message, engine_of):
    engine = engine_of("omni")
    with pytest.raises(RequestError, match=message):
        told(engine, {**engine.features(video()), **changed})


def test_a_long_sound_is_encoded_in_pieces(engine_of):
    described = engine_of("omni").loaded.processor.describe(sound(9))
    assert len(described.sound) == 2


def test_features_have_features_of_none(engine_of):
    engine = engine_of("omni")
    part = engine.features(image())
    with pytest.raises(RequestError, match="image 1: it is image_features already"):
        engine.features(part)
    with pytest.raises(RequestError, match="use_audio_in_video"):
        engine.features({**video(), "use_audio_in_video": True})


def test_a_model_of_text_has_none(tmp_path):
    folder = tiny_checkpoint.write_text_model(tmp_path)
    with tilewright.Engine(folder, kv_memory="4MB", max_context=64, pack_cache=False) as engine:
        with pytest.raises(RequestError, match="accepts text only"):
            engine.features(image())
        with pytest.raises(RequestError, match="accepts text only"):
            told(engine, {"type": "image_features", "image_features": torch.ones(1, 1), "grid": (1, 2, 2)})


def test_all_bytes_of_a_request_count():
    from tilewright.inputs.messages import normalize

    part = {"type": "image_features", "image_features": np.zeros((4, 8), np.float32), "grid": (1, 4, 4)}
    limits = MediaLimits(max_total_bytes=300)
    normalize([{"role": "user", "content": [part] * 2}], limits=limits)
    with pytest.raises(RequestError, match="image 3: the request's media are more than 300 bytes"):
        normalize([{"role": "user", "content": [part] * 3}], limits=limits)
