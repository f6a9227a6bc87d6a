"""A tiny Qwen3-Omni with random weights, as transformers has it, and our networks filled from it."""

import functools

import torch
from components import randomized
from oracle import require

from tilewright.layers import partition
from tilewright.parallel.group import SingleGroup
from tilewright.weights.spec import iter_weights

NUM_CODES = 4  # of a frame
CODEBOOK = 32

CODE2WAV = {
    "codebook_size": CODEBOOK,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_quantizers": NUM_CODES,
    "decoder_dim": 32,
    "upsample_rates": [4, 3],
    "upsampling_ratios": [2, 2],
}


@functools.cache
def code2wav(**changes):
    """transformers' decoder of codes, whose samples are mostly within [-1, 1] and move."""
    omni = require("transformers.models.qwen3_omni_moe")
    modeling = omni.modeling_qwen3_omni_moe
    config = omni.configuration_qwen3_omni_moe.Qwen3OmniMoeCode2WavConfig(**CODE2WAV | changes)
    return quiet(randomized(modeling.Qwen3OmniMoeCode2Wav(config)))


def quiet(network):
    """The decoder with convolutions that keep the size of what goes through."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 3:
                parameter.mul_(parameter.shape[1] ** -0.5)
        network.decoder[-1].conv.weight.mul_(0.06)
    return network


def filled(build, network, prefix, dtype=torch.float32, group=None):
    """What `build` makes, with the weights of transformers' network: each is used, and has the shape asked for."""
    with partition.use(partition.Partition(group or SingleGroup())):
        ours = build()
    state = {f"{prefix}.{name}": tensor for name, tensor in network.state_dict().items()}
    asked = set()
    for weight in iter_weights(ours):
        for source in weight.sources:
            assert tuple(state[source.name].shape) == source.shape, source
            asked.add(source.name)
        weight.build([state[source.name] for source in weight.sources], dtype)
    assert asked == set(state), set(state) - asked
    return ours


TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "interleaved": True,
    },
}
TALKER_TEXT = TEXT | {
    # The talker never says its last 1,024 ids but its end.
    "vocab_size": 1024 + CODEBOOK,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "shared_expert_intermediate_size": 40,
}
CODE_PREDICTOR = {
    "vocab_size": CODEBOOK,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_code_groups": NUM_CODES,
    "max_position_embeddings": 512,
}
TALKER = {
    "text_config": TALKER_TEXT,
    "code_predictor_config": CODE_PREDICTOR,
    "num_code_groups": NUM_CODES,
    "thinker_hidden_size": TEXT["hidden_size"],
    "accept_hidden_layer": 2,
    "codec_eos_token_id": CODEBOOK + 20,
    "codec_nothink_id": CODEBOOK + 21,
    "codec_think_bos_id": CODEBOOK + 22,
    "codec_think_eos_id": CODEBOOK + 23,
    "codec_pad_id": CODEBOOK + 24,
    "codec_bos_id": CODEBOOK + 25,
    "speaker_id": {"ann": CODEBOOK + 30, "bob": CODEBOOK + 31},
    "audio_token_id": 150,
    "image_token_id": 151,
    "video_token_id": 152,
    "vision_start_token_id": 153,
    "audio_start_token_id": 155,
}


@functools.cache
def talker():
    """transformers' talker with its code predictor."""
    omni = require("transformers.models.qwen3_omni_moe")
    config = omni.configuration_qwen3_omni_moe.Qwen3OmniMoeTalkerConfig(**TALKER)
    config.spatial_merge_size = 2
    return randomized(omni.modeling_qwen3_omni_moe.Qwen3OmniMoeTalkerForConditionalGeneration(config))


THINKER = {
    "text_config": TEXT | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "audio_config": {
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "d_model": 16,
        "output_dim": TEXT["hidden_size"],
        "downsample_hidden_size": 8,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": TEXT["hidden_size"],
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
    "audio_token_id": 150,
    "image_token_id": 151,
    "video_token_id": 152,
    "vision_start_token_id": 153,
    "vision_end_token_id": 154,
    "audio_start_token_id": 155,
    "audio_end_token_id": 156,
}
OMNI = {
    "thinker_config": THINKER,
    "talker_config": TALKER,
    "code2wav_config": CODE2WAV,
    "im_start_token_id": 140,
    "im_end_token_id": 141,
    "system_token_id": 142,
    "user_token_id": 143,
    "assistant_token_id": 144,
    "tts_pad_token_id": 145,
    "tts_bos_token_id": 146,
    "tts_eos_token_id": 147,
}


EAGERNESS = -1.6


@functools.cache
def omni():
    """transformers' whole model."""
    module = require("transformers.models.qwen3_omni_moe")
    config = module.configuration_qwen3_omni_moe.Qwen3OmniMoeConfig(**OMNI)
    config.talker_config.spatial_merge_size = 2
    model = randomized(module.modeling_qwen3_omni_moe.Qwen3OmniMoeForConditionalGeneration(config), seed=3)
    quiet(model.code2wav)
    with torch.no_grad():  # it ends now and then, not at once
        model.talker.codec_head.weight[TALKER["codec_eos_token_id"]] *= EAGERNESS
    return model
