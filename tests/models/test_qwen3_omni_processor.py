"""Qwen3-Omni's inputs are those of transformers' processor: ids, mel frames, sizes and frames of videos."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
from checkpoint_files import DATA, write_qwen3_vl_folder
from media_parts import patches_of
from oracle import require
from PIL import Image

from tilewright.host.files import CheckpointError
from tilewright.inputs.video import OpenedVideo
from tilewright.models.qwen3_omni.processor import OmniProcessor, frame_indices, frame_size, seconds_per_group

AUDIO_TOKENS = {151669: "<|audio_start|>", 151670: "<|audio_end|>", 151671: "<tts_pad>", 151672: "<tts_text_bos>"}
AUDIO_TOKENS |= {151673: "<tts_text_eod>", 151674: "<tts_text_bos_single>", 151675: "<|audio_pad|>"}
# What the released folder says, beside the sizes of pictures.
PREPROCESSOR = {
    "feature_size": 128, "hop_length": 160, "n_fft": 400, "sampling_rate": 16_000, "dither": 0.0, "chunk_length": 300,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_pixels": 3136, "max_pixels": 12_845_056, "merge_size": 2,
    "patch_size": 16, "temporal_patch_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_qwen3_vl_folder(tmp_path_factory.mktemp("omni_processor"))
    shutil.copyfile(DATA / "qwen3_omni_config.json", folder / "config.json")
    shutil.copyfile(DATA / "qwen3_omni.jinja", folder / "chat_template.jinja")
    (folder / "video_preprocessor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": id, "content": content, **plain} for id, content in AUDIO_TOKENS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def extractor():
    return require("transformers").WhisperFeatureExtractor(feature_size=128)


@pytest.fixture(scope="module")
def oracle():
    """transformers' expansion of placeholders, without its tokenizer and the parts that want torchvision."""
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

    class Merging:
        merge_size = 2

    processor = Qwen3OmniMoeProcessor.__new__(Qwen3OmniMoeProcessor)
    processor.image_processor = processor.video_processor = Merging
    processor.image_token, processor.video_token, processor.audio_token = (
        f"<|{kind}_pad|>" for kind in ("image", "video", "audio")
    )
    processor.vision_bos_token, processor.vision_eos_token = "<|vision_start|>", "<|vision_end|>"
    processor.audio_bos_token, processor.audio_eos_token = "<|audio_start|>", "<|audio_end|>"
    return processor


def sound(seconds, seed=0):
    return (np.random.default_rng(seed).standard_normal(int(seconds * 16_000)) * 0.1).astype(np.float32)


def frames(count, height=96, width=128):
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def lengths_of(medium_frames):
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    return _get_feat_extract_output_lengths(torch.tensor(medium_frames))


def expand(oracle, text, sounds=(), pictures=(), videos=(), sound_of_video=None):
    """The text with as many placeholders for each medium as transformers gives it."""
    sounds = {"num_audio_tokens": lengths_of(sounds)}
    pictures = {"image_grid_thw": torch.tensor(pictures)}
    videos = {"video_grid_thw": torch.tensor(videos), "video_second_per_grid": [1.0] * len(videos)}
    heard = {
        "processed_audio": sounds,
        "video_to_audio_indices": [sound_of_video],
        "load_audio_from_video": sound_of_video is not None,
        "position_id_per_seconds": 13.0,
    }
    replacements = {
        oracle.audio_token: (oracle.replace_audio_token(sounds, i) for i in itertools.count()),
        oracle.image_token: (oracle.replace_image_token(pictures, i) for i in itertools.count()),
        oracle.video_token: (oracle.replace_video_token(videos, i, **heard) for i in itertools.count()),
    }
    return re.sub("|".join(map(re.escape, replacements)), lambda token: next(replacements[token.group()]), text)


def test_a_chat_is_that_of_transformers(processor, oracle):
    """A sound, a picture, a sound and a video, in order."""
    picture = Image.fromarray(frames(1)[0])
    parts = [
        {"type": "audio", "audio": sound(2.37)},
        {"type": "image", "image": picture},
        {"type": "text", "text": "and"},
        {"type": "audio", "audio": sound(0.5, 1)},
        {"type": "video", "video": frames(20), "fps": 4.0},
        {"type": "text", "text": "What do you hear?"},
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    inputs = processor.chat(messages)
    grids = {kind: [m.grid for m in inputs.media if m.kind == kind] for kind in ("image", "video")}
    assert grids["image"] == [(1, 6, 8)] and grids["video"][0][0] == 5
    bare = [{"type": part["type"], **({"text": part["text"]} if "text" in part else {})} for part in parts]
    text = processor.template.render([messages[0], {"role": "user", "content": bare}], add_generation_prompt=True)
    expanded = expand(oracle, text, [237, 50], grids["image"], grids["video"])
    assert list(inputs.token_ids) == processor.tokenizer.encode(expanded)


def test_a_video_with_its_sound_is_that_of_transformers(processor, oracle, tmp_path):
    from clips import write_talking_clip

    clip = write_talking_clip(tmp_path / "clip.mp4", 75, sound(3.0), 16_000)
    parts = [{"type": "video", "video": clip, "use_audio_in_video": True}, {"type": "text", "text": "What?"}]
    inputs = processor.chat([{"role": "user", "content": parts}])
    (video,) = [medium for medium in inputs.media if medium.kind == "video"]
    (heard,) = [medium for medium in inputs.media if medium.kind == "audio"]
    bare = [{"type": "video"}, {"type": "text", "text": "What?"}]
    text = processor.template.render([{"role": "user", "content": bare}], add_generation_prompt=True)
    expanded = expand(oracle, text, [heard.grid[1]], videos=[video.grid], sound_of_video=0)
    assert video.grid[0] == 3 and list(inputs.token_ids) == processor.tokenizer.encode(expanded)


def test_mel_frames_are_those_of_transformers(processor, extractor):
    """Of a sound that is encoded in two pieces; they fill rows of the buffer as they come."""
    samples = sound(40.0, 3)
    found = extractor(samples, sampling_rate=16_000, padding=True, truncation=False, return_tensors="pt")
    inputs = processor.chat([{"role": "user", "content": [{"type": "audio", "audio": samples}]}])
    assert [medium.grid for medium in inputs.media] == [(100, 3200, 128), (100, 800, 128)]
    assert [medium.num_features for medium in inputs.media] == [416, 104]
    assert len({medium.key for medium in inputs.media}) == 2
    ours = torch.cat([patches_of(processor, m).flatten()[: m.grid[1] * 128].view(-1, 128) for m in inputs.media])
    torch.testing.assert_close(ours, found["input_features"][0].T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count, fps", [(1, 2.0), (3, 2.0), (20, 4.0), (75, 25.0), (301, 30.0), (90_000, 30.0)])
def test_sampled_frames_are_those_of_transformers(processor, count, fps):
    ours = frame_indices(count, fps, processor.video)
    if count == 1:  # transformers divides by zero
        assert ours == [0]
        return
    # Qwen2VLVideoProcessor.sample_frames with its defaults and 2 frames a second; the class itself wants torchvision.
    num_frames = min(max(count / fps * 2.0, 4), min(768, count) // 2 * 2)
    num_frames = int(num_frames / 2) * 2
    assert ours == torch.arange(0, count, count / num_frames, dtype=torch.float64).int().tolist()


@pytest.mark.parametrize("height, width, count", [(96, 128, 4), (1080, 1920, 20), (1080, 1920, 768), (31, 500, 4)])
def test_sizes_of_frames_are_those_of_transformers(processor, height, width, count):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    video = OpenedVideo("video 1", count, 2.0, height, width, lambda indices: iter(()))
    share = int(128_000 * 32 * 32 * 0.9) * 2 // count
    most = max(min(768 * 32 * 32, share), int(128 * 32 * 32 * 1.05))
    # A frame has whole merged patches: ours rounds the bound to them.
    most = most // 1024 * 1024
    theirs = smart_resize(height, width, factor=32, min_pixels=128 * 32 * 32, max_pixels=most)
    assert frame_size(video, count, processor.video) == theirs


def test_time_of_groups(processor):
    """What a group stands for is told by the video's own length, also where fewer frames are sampled than asked for."""
    video = OpenedVideo("video 1", 90_000, 30.0, 96, 128, lambda indices: iter(()))
    assert seconds_per_group(video, 768, processor.video) == pytest.approx(3000 / 384)


@pytest.mark.parametrize(
    "settings", [{"feature_size": 80}, {"hop_length": 200}, {"n_fft": 512}, {"sampling_rate": 24_000}, {"dither": 0.1}]
)
def test_other_preprocessing_is_refused(folder, config, processor, tmp_path, settings):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **settings}))
    (name,) = settings
    with pytest.raises(CheckpointError, match=f"sound preprocessing has {name} {settings[name]}, expected"):
        OmniProcessor(config, tmp_path, processor.tokenizer, None)
