"""Pipelines in diffusers' layout with tiny random networks, and the same pipelines as diffusers runs them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from oracle import require
from tiny_checkpoint import QWEN_SPECIAL, QWEN_TAGS, write_tokenizer

TEMPLATE = (Path(__file__).parents[1] / "data" / "qwen3.jinja").read_text()
VOCAB = 280
CAPTION_WIDTH = 48
Z_IMAGE = {
    "in_channels": 4,
    "dim": 96,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": CAPTION_WIDTH,
    "axes_dims": [8, 8, 8],
    "axes_lens": [1024, 64, 64],
}
VAE = {
    "latent_channels": 4,
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": True,
}
TURBO = {"num_train_timesteps": 1000, "use_dynamic_shifting": False, "shift": 3.0}


def randomized(module, std=0.1):
    """The module with every parameter random, those that begin as zeros or ones included: all of them then matter."""
    for name, parameter in module.named_parameters():
        is_scale = "norm" in name and name.endswith("weight") and parameter.dim() == 1
        torch.nn.init.normal_(parameter, mean=1.0 if is_scale else 0.0, std=std)
    return module.eval()


def qwen3(layers=3, width=CAPTION_WIDTH):
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    )
    return randomized(transformers.Qwen3Model(config), 0.15)


def qwen_tokenizer(folder):
    """A tokenizer of bytes with Qwen3's template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, QWEN_SPECIAL, QWEN_TAGS, TEMPLATE)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def z_image_pipeline(folder, *, scheduler=None, **transformer):
    """Writes a Z-Image folder, and gives the pipeline as diffusers has it."""
    diffusers = require("diffusers")
    torch.manual_seed(0)
    pipeline = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**(scheduler or TURBO)),
        vae=randomized(diffusers.AutoencoderKL(**VAE)),
        text_encoder=qwen3(),
        tokenizer=qwen_tokenizer(folder / "tokenizer"),
        transformer=randomized(diffusers.ZImageTransformer2DModel(**{**Z_IMAGE, **transformer})),
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return pipeline
