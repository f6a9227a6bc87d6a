"""FLUX.1 and FLUX.2 klein with tiny random networks: folders, and the same pipelines as diffusers runs them."""

from pathlib import Path

import torch
from components import randomized
from oracle import require
from tokenizers import pre_tokenizers

TEMPLATE = (Path(__file__).parents[1] / "data" / "qwen3.jinja").read_text()
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT_WIDTH, POOLED_WIDTH = 24, 32
VAE = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "latent_channels": 4,
}
FLUX_VAE = {"scaling_factor": 0.36, "shift_factor": 0.12, "use_quant_conv": False, "use_post_quant_conv": False}
TRANSFORMER = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
}
SCHEDULERS = {
    "schnell": {"shift": 1.0},
    "dev": {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15},
}


def clip_tokenizer():
    """Of bytes, and two words that are merged."""
    transformers = require("transformers")
    merges = [("r", "e"), ("re", "d</w>"), ("c", "a"), ("ca", "t</w>")]
    tokens = [*ALPHABET, *(f"{byte}</w>" for byte in ALPHABET), *(a + b for a, b in merges)]
    vocab = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def t5_tokenizer():
    """Of letters and a few longer pieces."""
    transformers = require("transformers")
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    pieces = ["▁", "▁a", "▁red", "▁cat", "s", *"abcdefghijklmnopqrstuvwxyz.,'0123456789"]
    scores = [(piece, -1.0 - 0.1 * i) for i, piece in enumerate(dict.fromkeys(pieces))]
    return transformers.T5Tokenizer(vocab=special + scores, extra_ids=0, additional_special_tokens=[])


def clip_encoder(vocab_size):
    transformers = require("transformers")
    config = transformers.CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=POOLED_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=2,  # as FLUX.1 has it: the highest id is the end
    )
    return randomized(transformers.CLIPTextModel(config), 1)


def t5_encoder(vocab_size):
    transformers = require("transformers")
    config = transformers.T5Config(
        vocab_size=vocab_size,
        d_model=TEXT_WIDTH,
        d_ff=40,
        d_kv=8,
        num_layers=2,
        num_heads=3,
        feed_forward_proj="gated-gelu",
    )
    return randomized(transformers.T5EncoderModel(config), 2)


def flux_pipeline(folder, kind, class_name="FluxPipeline"):
    """Writes a folder of FLUX.1 schnell or dev, and gives the pipeline as diffusers has it."""
    diffusers = require("diffusers")
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    pipeline = getattr(diffusers, class_name)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULERS[kind]),
        vae=randomized(diffusers.AutoencoderKL(**VAE, **FLUX_VAE), 3),
        text_encoder=clip_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(len(tokenizer_2)),
        tokenizer_2=tokenizer_2,
        transformer=randomized(
            diffusers.FluxTransformer2DModel(
                **TRANSFORMER,
                joint_attention_dim=TEXT_WIDTH,
                pooled_projection_dim=POOLED_WIDTH,
                axes_dims_rope=(4, 6, 6),
                guidance_embeds=kind == "dev",
            ),
            4,
        ),
    )
    return saved(pipeline, folder)


def saved(pipeline, folder):
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return pipeline
