"""The config of Qwen3-Omni: the released one, and what is refused."""

import copy
import json
from pathlib import Path

import pytest

from tilewright.models.qwen3_omni.config import OmniConfig, halved
from tilewright.types import UnsupportedConfig

RELEASED = json.loads((Path(__file__).parents[1] / "data" / "qwen3_omni_config.json").read_text())


def changed(path, value):
    config = copy.deepcopy(RELEASED)
    *tables, key = path.split(".")
    inner = config
    for name in tables:
        inner = inner[name]
    inner[key] = value
    return config


def test_released_config():
    config = OmniConfig.from_dict(RELEASED, {})
    audio = config.thinker.audio
    assert (audio.head_width, audio.frames_per_chunk, audio.chunks_per_window) == (64, 100, 8)
    assert (audio.features_per_chunk, audio.features_per_window, audio.bins_after_convs) == (13, 104, 16)
    assert config.thinker.text.layers[0].mlp.num_experts == 128
    assert config.thinker.vision.deepstack_layers == (8, 16, 24)
    # The talker's config does not say that its axes are interleaved; they are.
    assert config.talker.text.layers[0].attention.rope.scaling["mrope_interleaved"]
    assert config.talker.text.layers[0].mlp.shared_width == 768 and config.talker.speakers["chelsie"] == 2301
    assert config.talker.code_predictor.num_code_groups == config.code2wav.num_quantizers == 16
    assert config.code2wav.window == 72 and config.turns.assistant == 77091


@pytest.mark.parametrize(
    "frames, features", [(0, 0), (1, 1), (8, 1), (9, 2), (99, 13), (100, 13), (101, 14), (250, 33)]
)
def test_features_of_a_sound(frames, features):
    assert OmniConfig.from_dict(RELEASED, {}).thinker.audio.num_features(frames) == features


def test_an_axis_is_halved_three_times():
    assert [halved(length) for length in (0, 1, 8, 9, 128)] == [0, 1, 1, 2, 16]


def test_without_a_voice():
    config = OmniConfig.from_dict({**changed("enable_audio_output", False), "talker_config": None}, {})
    assert config.talker is None and config.code2wav is None


@pytest.mark.parametrize(
    "path, value, says",
    [
        ("thinker_config.audio_config.encoder_attention_heads", 7, "7 heads and d_model 1280"),
        ("thinker_config.audio_config.n_window_infer", 130, "n_window_infer 130"),
        ("thinker_config.audio_config.scale_embedding", True, "scale_embedding"),
        ("thinker_config.audio_config.output_dim", 1024, "output_dim is 1024, expected .* 2048"),
        ("thinker_config.vision_config.out_hidden_size", 1024, "out_hidden_size is 1024"),
        ("thinker_config.vision_config.apply_vit_abs_pos_embed", False, "apply_vit_abs_pos_embed"),
        ("talker_config.num_code_groups", 8, "num_code_groups 8"),
        ("talker_config.thinker_hidden_size", 1024, "thinker_hidden_size 1024, expected 2048"),
        ("code2wav_config.num_quantizers", 8, "num_quantizers 8"),
        ("code2wav_config.num_key_value_heads", 5, "num_key_value_heads 5"),
        ("code2wav_config.upsample_rates", [8, 0], "upsample_rates"),
        ("talker_config.speaker_id", [1], "speaker_id"),
        ("thinker_config", None, "thinker_config None"),
    ],
)
def test_what_is_refused(path, value, says):
    with pytest.raises(UnsupportedConfig, match=says):
        OmniConfig.from_dict(changed(path, value), {})
