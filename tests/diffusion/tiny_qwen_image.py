"""A tiny random pipeline of Qwen-Image, as diffusers runs it and as the folder it saves."""

import torch
from components import randomized
from oracle import require

TRANSFORMER = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer():
    """Qwen2's, of single bytes."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], eos_token=SPECIAL[2], padding_side="right"
    )


def make_text_encoder():
    transformers = require("transformers")
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 272,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return randomized(transformers.Qwen2_5_VLForConditionalGeneration(config))


def make_vae():
    torch.manual_seed(0)
    return (
        require("diffusers")
        .AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.8, 1.1, 2.0],
        )
        .eval()
    )


def make_scheduler():
    """With the published settings."""
    return require("diffusers").FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )


def save(folder):
    """diffusers' pipeline, saved to the folder."""
    diffusers = require("diffusers")
    pipeline = diffusers.QwenImagePipeline(
        tokenizer=make_tokenizer(),
        text_encoder=make_text_encoder(),
        vae=make_vae(),
        scheduler=make_scheduler(),
        transformer=randomized(diffusers.QwenImageTransformer2DModel(**TRANSFORMER)),
    )
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
