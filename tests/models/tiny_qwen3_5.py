"""Tiny random checkpoints of the Qwen3.5 family: all kinds of layers, sizes that fill no tile, odd ratios."""

from __future__ import annotations

import tiny
import torch
import transformers

DELTA, ATTENTION = "linear_attention", "full_attention"
TEXT = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": [DELTA, DELTA, ATTENTION, DELTA, ATTENTION],
}
# 8 of 32 elements of a head are turned; of their four frequencies two follow time.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
MROPE = {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
DENSE = {"intermediate_size": 160}
EXPERTS = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
VISION = {key: value for key, value in tiny.VISION.items() if key != "deepstack_visual_indexes"}
IDS = {
    "image_token_id": tiny.IMAGE,
    "video_token_id": tiny.VIDEO,
    "vision_start_token_id": tiny.START,
    "vision_end_token_id": tiny.END,
}
# The last layer is a recurrent one; three value heads to a key head; widths that are no multiple of anything.
ODD = {
    "layer_types": [ATTENTION, DELTA, ATTENTION, DELTA, DELTA],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 17,
    "linear_value_head_dim": 23,
    "linear_conv_kernel_dim": 3,
    "head_dim": 40,
}


def _seeing(config_class, text: dict, *, tied: bool, ids: dict[str, int] = IDS):
    return config_class(
        text_config={**TEXT, "rope_parameters": MROPE, **text}, vision_config=VISION, tie_word_embeddings=tied, **ids
    )


CONFIGS = {
    "qwen3_5": _seeing(transformers.Qwen3_5Config, DENSE, tied=True),
    "qwen3_5_moe": _seeing(transformers.Qwen3_5MoeConfig, {**EXPERTS, "layer_types": ODD["layer_types"]}, tied=False),
    "qwen3_5_text": transformers.Qwen3_5TextConfig(**{**TEXT, **DENSE, **ODD}, rope_parameters=ROPE),
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig(
        **TEXT, **EXPERTS, rope_parameters=ROPE, tie_word_embeddings=True
    ),
    "qwen3_next": transformers.Qwen3NextConfig(
        **{**TEXT, "linear_conv_kernel_dim": 2}, **DENSE, **EXPERTS, rope_parameters=ROPE, mlp_only_layers=[1]
    ),
}
FAMILIES = list(CONFIGS)
SEEING = ["qwen3_5", "qwen3_5_moe"]


def seeing_config(vocab_size: int, ids: dict[str, int]) -> transformers.Qwen3_5Config:
    """The config of "qwen3_5" for a tokenizer of its own."""
    return _seeing(transformers.Qwen3_5Config, {**DENSE, "vocab_size": vocab_size}, tied=True, ids=ids)


def make_network(name: str, config: transformers.PreTrainedConfig | None = None) -> torch.nn.Module:
    """transformers' model in fp32; decays from a few tokens to thousands, so that states matter, near and far."""
    torch.manual_seed(FAMILIES.index(name))
    config = config or CONFIGS[name]
    mapping = (
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if name in SEEING
        else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    network = mapping[type(config)](config).eval()
    network.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-7.0, 1.0)
            elif parameter_name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() == 1:
                parameter.normal_(1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
    return network


def prompts_for(name: str, network: torch.nn.Module) -> list[tiny.Prompt]:
    """Text shorter and longer than a chunk of the delta rule; for models that see also pictures and a video."""
    if name not in SEEING:
        return [tiny.text_prompt(150, 1), tiny.text_prompt(1, 2), tiny.text_prompt(33, 3)]
    return [
        tiny.text_prompt(70, 1, num_axes=3),
        tiny.media_prompt(network, [("image", (1, 6, 8))], 2),
        tiny.media_prompt(network, [("image", (1, 4, 4)), ("image", (1, 10, 6)), ("image", (1, 2, 12))], 3),
        tiny.media_prompt(network, [("video", (3, 4, 6)), ("image", (1, 8, 4))], 4),
    ]
