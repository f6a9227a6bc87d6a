"""The model's folder: a Z-Image pipeline as diffusers stores one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from training.tiny_draw.captions import drawings
from training.tiny_vl import tokenizer

NUM_SAMPLES = 4000  # captions whose words are looked at: all of them come up many times in as many
LATENT_CHANNELS = 8
CAPTION_WIDTH = 256
SIDE = 256
WEIGHTS = "diffusion_pytorch_model"  # what diffusers calls the files of its own networks

# The caption is what goes into the last layer, so the last layer itself is never computed: it is as small as it may be.
TEXT_ENCODER = {
    "architectures": ["Qwen3Model"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": CAPTION_WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
}
TRANSFORMER = {
    "_class_name": "ZImageTransformer2DModel",
    "all_f_patch_size": [1],
    "all_patch_size": [2],
    "axes_dims": [16, 24, 24],
    "axes_lens": [512, 64, 64],
    "cap_feat_dim": CAPTION_WIDTH,
    "dim": 256,
    "in_channels": LATENT_CHANNELS,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 8,
    "n_refiner_layers": 1,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}
VAE = {
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [24, 48, 72, 96],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "force_upcast": False,
    "in_channels": 3,
    "latent_channels": LATENT_CHANNELS,
    "layers_per_block": 1,
    "mid_block_add_attention": True,
    # One group: with few channels in each, flat areas would lose what colour they have to the norm.
    "norm_num_groups": 1,
    "out_channels": 3,
    "sample_size": SIDE,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 2.0,
    "use_dynamic_shifting": False,
}
INDEX = {
    "_class_name": "ZImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write_tokenizer(folder: Path) -> None:
    """Words of captions that follow a space are a token each; all else is single bytes."""
    source = drawings(Random("words"))
    captions = [next(source).caption for _ in range(NUM_SAMPLES)]
    tokenizer.write_tokenizer(folder, sorted({word for text in captions for word in re.findall(r" ([a-z]+)", text)}))


def write_configs(folder: Path, vocab_size: int, latent_shift: float, latent_scale: float) -> None:
    """All configs of the pipeline."""
    write_json(folder / "model_index.json", INDEX)
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_json(folder / "text_encoder" / "config.json", text_encoder_config(vocab_size))
    write_json(folder / "transformer" / "config.json", TRANSFORMER)
    factors = {"shift_factor": latent_shift, "scaling_factor": latent_scale}
    write_json(folder / "vae" / "config.json", {**VAE, **factors})


def text_encoder_config(vocab_size: int) -> dict[str, Any]:
    return {**TEXT_ENCODER, "vocab_size": vocab_size}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
