"""Tiny random pipelines of Wan, as diffusers runs them and as the folders it saves."""

import torch
from components import randomized
from oracle import require

TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 40,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "cat", "in", "the", "rain", "blurry", "&"]


def make_tokenizer():
    """Words of one alphabet, and the end that T5's has."""
    tokenizers, transformers = require("tokenizers"), require("transformers")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", WORDS.index("</s>"))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def make_text_encoder():
    transformers = require("transformers")
    config = transformers.UMT5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return randomized(transformers.UMT5EncoderModel(config))


VAE = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 0.8, 1.1, 2.0],
}
# Of 2.2 TI2V: squares of pixels, and shortcuts between stages.
VAE_22 = {
    **VAE,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "decoder_base_dim": 8,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}


def make_vae(config=VAE):
    torch.manual_seed(0)
    return require("diffusers").AutoencoderKLWan(**config).eval()


def make_scheduler(shift=3.0):
    return require("diffusers").UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def make_transformer(seed=0, **changes):
    return randomized(require("diffusers").WanTransformer3DModel(**{**TRANSFORMER, **changes}), seed)


def save(folder, class_name="WanPipeline", vae=None, transformer=None, scheduler=None, **options):
    """diffusers' pipeline, saved to the folder."""
    pipeline = getattr(require("diffusers"), class_name)(
        tokenizer=make_tokenizer(),
        text_encoder=make_text_encoder(),
        vae=vae or make_vae(),
        scheduler=scheduler or make_scheduler(),
        transformer=transformer or make_transformer(),
        **options,
    )
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
