"""FLUX.1 and FLUX.2 klein with tiny random networks: folders, and the same pipelines as diffusers runs them."""

import functools

import tiny_pipelines
import torch
from components import randomized
from oracle import require
from tokenizers import pre_tokenizers

from tilewright import Diffusion

PROMPT = "a red cat, 3 cats"
WIDTH, HEIGHT, NUM_STEPS = 24, 16, 4
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


def klein_pipeline(folder, *, is_distilled):
    """Writes a folder of FLUX.2 klein, and gives the pipeline as diffusers has it."""
    diffusers = require("diffusers")
    torch.manual_seed(0)
    text_encoder = tiny_pipelines.qwen3(layers=28, width=TEXT_WIDTH)
    vae = randomized(diffusers.AutoencoderKLFlux2(**VAE), 3)
    generator = torch.Generator().manual_seed(4)
    vae.bn.running_mean.copy_(torch.randn(vae.bn.running_mean.shape, generator=generator) * 0.2)
    vae.bn.running_var.copy_(torch.rand(vae.bn.running_var.shape, generator=generator) + 0.5)
    pipeline = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULERS["dev"]),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tiny_pipelines.qwen_tokenizer(folder / "tokenizer"),
        transformer=randomized(
            diffusers.Flux2Transformer2DModel(
                **TRANSFORMER,
                joint_attention_dim=3 * TEXT_WIDTH,
                timestep_guidance_channels=32,
                axes_dims_rope=(4, 4, 4, 4),
                guidance_embeds=False,
            ),
            5,
        ),
        is_distilled=is_distilled,
    )
    return saved(pipeline, folder)


@functools.cache
def opened(folder, dtype="float32"):
    return Diffusion(folder, dtype=dtype, pack_cache=False)


def ours(folder, dtype="float32", **settings):
    return made_by(opened(folder, dtype), **settings)


def made_by(diffusion, **settings):
    settings = {"width": WIDTH, "height": HEIGHT, "num_steps": NUM_STEPS, "output": "array", **settings}
    return diffusion.generate(PROMPT, **settings)
