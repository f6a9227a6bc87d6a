"""The model's folder: configs, tokenizer and weights as any Qwen3-VL checkpoint has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from training.tiny_vl.tokenizer import write_tokenizer
from training.tiny_vl.vocabulary import words_after_spaces

IMAGE_PIXELS = 65_536  # each image is brought to about 256 x 256
CLIP_PIXELS = 131_072  # of all frames of a clip together: eight of 128 x 128
MAX_FRAMES = 8

VISION = {
    "deepstack_visual_indexes": [2, 5],
    "depth": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 256,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "model_type": "qwen3_vl",
    "num_heads": 4,
    "num_position_embeddings": 256,
    "out_hidden_size": 384,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"},
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
    "use_cache": True,
}


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    token_id = tokenizer.token_to_id
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    text = {
        **TEXT,
        "vocab_size": vocab_size,
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": VISION,
    }


def write_configs(folder: Path) -> dict[str, Any]:
    """All files but the weights; what config.json says."""
    write_tokenizer(folder, words_after_spaces())
    config = make_config(Tokenizer.from_file(str(folder / "tokenizer.json")))
    pixels = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = {
        **pixels,
        "size": {"shortest_edge": IMAGE_PIXELS, "longest_edge": IMAGE_PIXELS},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    video = {
        **pixels,
        "size": {"shortest_edge": 4096, "longest_edge": CLIP_PIXELS},
        "fps": 2,
        "min_frames": 4,
        "max_frames": MAX_FRAMES,
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    ends = [config["text_config"]["eos_token_id"], config["text_config"]["bos_token_id"]]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", image),
        ("video_preprocessor_config.json", video),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return config
