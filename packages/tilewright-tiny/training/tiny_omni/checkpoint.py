"""The model's folder: configs, tokenizer and weights as any Qwen3-Omni checkpoint has them, with or without a voice.

python -m training.tiny_omni.checkpoint --hearing hearing --codec voice --talker voice --out candidate
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tilewright.ops.media import HOP, SAMPLE_RATE, WINDOW
from training.shards import read_weights, write_weights
from training.tiny_omni.utterances import written_words
from training.tiny_vl.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer

WIDTH = 256
NUM_MEL_BINS = 128
MAX_SOUND_S = 300
NAMED_TOKENS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
SPEECH_TOKENS = ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
TOKENS = (*SPECIAL_TOKENS, "<|audio_start|>", "<|audio_end|>", *SPEECH_TOKENS, "<|audio_pad|>")
AUDIO_TEMPLATE = CHAT_TEMPLATE.replace(
    "      {%- elif part.type == 'video'",
    "      {%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}\n"
    "        <|audio_start|><|audio_pad|><|audio_end|>\n"
    "      {%- elif part.type == 'video'",
)

AUDIO = {
    "activation_dropout": 0,
    "activation_function": "gelu",
    "attention_dropout": 0,
    "conv_chunksize": 500,
    "d_model": WIDTH,
    "downsample_hidden_size": 64,
    "dropout": 0,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "encoder_layers": 5,
    "initializer_range": 0.02,
    "max_source_positions": 1500,
    "model_type": "qwen3_omni_moe_audio_encoder",
    "n_window": 50,
    "n_window_infer": 800,
    "num_hidden_layers": 5,
    "num_mel_bins": NUM_MEL_BINS,
    "output_dim": WIDTH,
    "scale_embedding": False,
}
# Every layer is dense: in so few parameters, experts would each see too little.
TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 640,
    "max_position_embeddings": 8192,
    "mlp_only_layers": [0, 1, 2, 3],
    "model_type": "qwen3_omni_moe_text",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default", "type": "default"},
    "rope_theta": 10_000,
    "shared_expert_intermediate_size": 0,
    "tie_word_embeddings": False,
}
# It is there because the family has it, untrained and as small as it may be.
VISION = {
    "apply_vit_abs_pos_embed": True,
    "deepstack_visual_indexes": [],
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "model_type": "qwen3_omni_moe_vision_encoder",
    "num_heads": 1,
    "num_position_embeddings": 16,
    "out_hidden_size": WIDTH,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

NUM_CODES, CODEBOOK = 4, 512  # of a frame of speech, 25 of which last a second; entries of each codebook
NUM_SPECIAL = 1024  # the last ids of the talker's vocabulary, of which it never says any but its end
_CODEC_TOKENS = ("eos_token", "nothink", "think_bos", "think_eos", "pad", "bos")
SPEAKER_IDS = {"chelsie": CODEBOOK + 16}
# A layer has one expert, which all rows take: in so few parameters, more would each see too little.
TALKER_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "mlp_only_layers": [],
    "model_type": "qwen3_omni_moe_talker_text",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default", "type": "default"},
    "rope_theta": 10_000,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": False,
    "vocab_size": CODEBOOK + NUM_SPECIAL,
}
CODE_PREDICTOR = {
    "attention_bias": False,
    "attention_dropout": 0,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
    "model_type": "qwen3_omni_moe_talker_code_predictor",
    "num_attention_heads": 4,
    "num_code_groups": NUM_CODES,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "vocab_size": CODEBOOK,
}
TALKER = {
    "model_type": "qwen3_omni_moe_talker",
    "dtype": "bfloat16",
    "accept_hidden_layer": 2,
    "code_predictor_config": CODE_PREDICTOR,
    "num_code_groups": NUM_CODES,
    "output_router_logits": False,
    "speaker_id": SPEAKER_IDS,
    "text_config": TALKER_TEXT,
    "thinker_hidden_size": WIDTH,
    **{f"codec_{name}_id": CODEBOOK + number for number, name in enumerate(_CODEC_TOKENS)},
}
CODE2WAV = {
    "attention_bias": False,
    "attention_dropout": 0,
    "codebook_size": CODEBOOK,
    "decoder_dim": 320,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "layer_scale_initial_scale": 0.1,
    "max_position_embeddings": 8000,
    "model_type": "qwen3_omni_moe_code2wav",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_quantizers": NUM_CODES,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000,
    "sliding_window": 72,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2],
}
SAMPLES_PER_FRAME = math.prod((*CODE2WAV["upsample_rates"], *CODE2WAV["upsampling_ratios"]))  # type: ignore[misc]
CODEC_FILE, TALKER_FILE = "code2wav", "talker"  # stems of the files that trainings leave


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    token_id = tokenizer.token_to_id
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        "dtype": "bfloat16",
        "audio_config": AUDIO,
        "text_config": {**TEXT, "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64},
        "vision_config": VISION,
        "audio_token_id": token_id("<|audio_pad|>"),
        "audio_start_token_id": token_id("<|audio_start|>"),
        "audio_end_token_id": token_id("<|audio_end|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "user_token_id": token_id("user"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "initializer_range": 0.02,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "enable_audio_output": False,
        "im_start_token_id": token_id("<|im_start|>"),
        "im_end_token_id": token_id("<|im_end|>"),
        "system_token_id": token_id("system"),
        "user_token_id": token_id("user"),
        "assistant_token_id": token_id("assistant"),
        **{
            f"tts_{name}_token_id": token_id(token)
            for name, token in zip(("pad", "bos", "eos"), SPEECH_TOKENS, strict=True)
        },
        "thinker_config": thinker,
    }


def write_configs(folder: Path) -> dict[str, Any]:
    """All files but the weights; what config.json says."""
    write_tokenizer(
        folder,
        written_words(),
        special_tokens=TOKENS,
        named_tokens=NAMED_TOKENS,
        chat_template=AUDIO_TEMPLATE,
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = make_config(tokenizer)
    preprocessing = {
        "chunk_length": MAX_SOUND_S,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": NUM_MEL_BINS,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "n_samples": MAX_SOUND_S * SAMPLE_RATE,
        "nb_max_frames": MAX_SOUND_S * SAMPLE_RATE // HOP,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": SAMPLE_RATE,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_pixels": 65_536,
        "min_pixels": 3_136,
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "processor_class": "Qwen3OmniMoeProcessor",
    }
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", preprocessing),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return config


def with_voice(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the model that also speaks."""
    thinker = config["thinker_config"]
    named = ("audio", "audio_start", "image", "video", "vision_start")
    tokens = {f"{name}_token_id": thinker[f"{name}_token_id"] for name in named}
    talker = {**TALKER, **tokens, "spatial_merge_size": VISION["spatial_merge_size"]}
    return {**config, "enable_audio_output": True, "talker_config": talker, "code2wav_config": CODE2WAV}


def write_speaking(hearing: Path, codec: Path, talker: Path, out: Path) -> None:
    """The folder of a model that hears and speaks, of one that hears and of what trainings of the voice left."""
    out.mkdir(parents=True, exist_ok=True)
    for file in hearing.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not file.name.endswith("index.json"):
            shutil.copy(file, out / file.name)
    config = with_voice(json.loads((hearing / "config.json").read_text()))
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    thinker = {name: w for name, w in read_weights(hearing).items() if name.startswith("thinker.")}
    parts = read_weights(codec, CODEC_FILE) | read_weights(talker, TALKER_FILE)
    for old in out.glob("*.safetensors*"):
        old.unlink()
    write_weights(out, thinker | parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_omni.checkpoint",
        description="Writes the folder of a model that hears and speaks.",
    )
    for name, what in (
        ("hearing", "checkpoint of the model that hears"),
        ("codec", "folder of train_codec"),
        ("talker", "folder of train_talker"),
        ("out", "folder to write"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="FOLDER", help=what)
    options = parser.parse_args(arguments)
    write_speaking(options.hearing, options.codec, options.talker, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
