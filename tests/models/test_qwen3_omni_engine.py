"""Sounds through the engine: answers are those of transformers, features are kept by content, errors are clear."""

import numpy as np
import pytest
import torch
from clips import write_clip, write_talking_clip
from oracle import require
from sounds import wav
from tiny_checkpoint import write_omni_model
from tiny_omni import BINS
from torch.nn import functional

from tilewright.engine.engine import Engine
from tilewright.inputs.media import MediaLimits
from tilewright.types import RequestError

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_omni_model(tmp_path_factory.mktemp("omni_chat"))


@pytest.fixture(scope="module")
def engine(folder):
    options = {"dtype": "float32", "pack_cache": False, "kv_memory": "64MB", "max_sequences": 4}
    with Engine(folder, **options, media_limits=MediaLimits(max_duration_s=30)) as engine:
        yield engine


@pytest.fixture(scope="module")
def network(folder):
    return require("transformers").Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).thinker.eval()


def tone(seconds, hertz=300, rate=16_000):
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(hertz).standard_normal(len(time)) * 0.02
    return (np.sin(2 * np.pi * hertz * time * (1 + time / 9)) * 0.3 + noise).astype(np.float32)


def asked(*parts, text="What is it?"):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def heard(sound):
    return {"type": "audio", "audio": sound}


def answer_of_transformers(network, engine, messages, sounds):
    """Greedy, from our token ids and its own mel frames, those of each sound by itself: in a batch it pads samples."""
    extractor = require("transformers").WhisperFeatureExtractor(feature_size=BINS)
    options = {"sampling_rate": 16_000, "padding": True, "truncation": False, "return_tensors": "pt"}
    frames = [extractor(sound, **options)["input_features"][0] for sound in sounds]
    longest = max(mel.shape[1] for mel in frames)
    ids = torch.tensor([engine.loaded.processor.chat(messages).token_ids])
    network.model.rope_deltas = None
    with torch.no_grad():
        answer = network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=torch.stack([functional.pad(mel, (0, longest - mel.shape[1])) for mel in frames]),
            feature_attention_mask=torch.stack([(torch.arange(longest) < mel.shape[1]).long() for mel in frames]),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return answer[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("seconds", [(0.6,), (1.0,), (2.5, 1.3), (20.2,)], ids=str)
def test_answers_are_those_of_transformers(engine, network, seconds):
    """A sound of less than a second, several in order, and one that is encoded in three pieces."""
    sounds = [tone(length, 200 + 100 * index) for index, length in enumerate(seconds)]
    messages = asked(*map(heard, sounds))
    ours = engine.chat(messages, **GREEDY)
    assert list(ours.token_ids) == answer_of_transformers(network, engine, messages, sounds)


def test_every_way_to_give_a_sound(engine, tmp_path):
    samples = tone(1.5)
    data = wav(samples[:, None], 16_000)
    path = tmp_path / "sound.wav"
    path.write_bytes(data)
    ways = [heard(data), heard(path), heard(str(path))]
    answers = [engine.chat(asked(way), **GREEDY).token_ids for way in ways]
    assert len(set(answers)) == 1
    as_floats = [engine.chat(asked(heard(way)), **GREEDY).token_ids for way in (samples, (samples, 16_000))]
    assert len(set(as_floats)) == 1
    prompt = "<|audio_start|><|audio_pad|><|audio_end|>What is it?"
    assert (
        engine.generate(prompt, audios=[samples], **GREEDY).text
        == engine.generate(prompt, audios=[{"audio": samples}], **GREEDY).text
    )
    faster = (tone(1.5, rate=44_100), 44_100)
    tokens = engine.loaded.processor.chat(asked(heard(faster))).token_ids
    assert len(tokens) == len(engine.loaded.processor.chat(asked(heard(samples))).token_ids)


def test_features_are_kept_by_content(engine):
    messages = asked(heard(tone(2.2, 555)))
    first = engine.chat(messages, **GREEDY)
    features = engine.loop.core.resources.media.features
    lookups, hits = features.num_lookups, features.num_hits
    again = engine.chat(asked(heard(tone(2.2, 555)), text="What is that?"), **GREEDY)
    assert again.token_ids != () and first.token_ids != ()
    assert features.num_hits - hits == features.num_lookups - lookups


def test_the_sound_of_a_video(engine, tmp_path):
    clip = write_talking_clip(tmp_path / "talking.mp4", 50, tone(2.0, rate=16_000), 16_000)
    video = {"type": "video", "video": clip}
    seen = engine.loaded.processor.chat(asked(video))
    both = engine.loaded.processor.chat(asked(video), use_audio_in_video=True)
    assert [medium.kind for medium in seen.media] == ["video"]
    assert sorted(medium.kind for medium in both.media) == ["audio", "video"]
    ids = engine.loaded.processor.tokens
    between = both.token_ids[both.token_ids.index(ids.vision_start) : both.token_ids.index(ids.vision_end) + 1]
    assert between[:2] == (ids.vision_start, ids.audio_start) and between[-2:] == (ids.audio_end, ids.vision_end)
    kinds = [token for token, before in zip(between[2:-2], (0, *between[2:-2]), strict=False) if token != before]
    assert kinds == [ids.video, ids.audio, ids.video, ids.audio], "frames first, at the time they are shown"
    assert between.count(ids.audio) in (26, 27)  # AAC fills up its last frame
    answers = {
        engine.chat(asked(video), **GREEDY).token_ids,
        engine.chat(asked(video), use_audio_in_video=True, **GREEDY).token_ids,
    }
    assert len(answers) == 2
    own = {**video, "use_audio_in_video": True}
    assert engine.chat(asked(own), **GREEDY).token_ids in answers


def test_what_cannot_be_heard(engine, tmp_path):
    silent = write_clip(tmp_path / "silent.mp4", 30)
    frames = [np.zeros((48, 64, 3), np.uint8)] * 4
    for part, says in [
        (heard(tone(0.012)), "audio 1: 12.0 milliseconds, expected 12.6 or more"),
        (heard(tone(31)), "31.0 seconds, the limit is 30"),
        (heard(b"RIFF nonsense"), "audio 1"),
        (heard((tone(1), 10)), "10 samples a second"),
        (heard({"a": 1}), "it is a dict"),
        ({"type": "video", "video": silent, "use_audio_in_video": True}, "has no sound"),
        ({"type": "video", "video": frames, "use_audio_in_video": True}, "frames have no sound"),
        ({"type": "video", "video": silent, "use_audio_in_video": 1}, "expected true or false"),
    ]:
        with pytest.raises(RequestError, match=says):
            engine.chat(asked(part), **GREEDY)
    with pytest.raises(RequestError, match="no placeholder left"):
        engine.generate("no place", audios=[tone(1)], **GREEDY)
    with pytest.raises(RequestError, match="3 placeholders from token 0 on, expected 1 or 13"):
        engine.generate("<|audio_pad|>" * 3, audios=[tone(1)], **GREEDY)
    with pytest.raises(RequestError, match="more placeholders of audios"):
        engine.generate("<|audio_pad|> and <|audio_pad|>", audios=[tone(1)], **GREEDY)
