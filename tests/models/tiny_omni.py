"""A tiny Qwen3-Omni with random weights, as transformers saves it, and the same prompts for both."""

from __future__ import annotations

import functools

import numpy as np
import tiny
import torch
import transformers

from tilewright.inputs.processor import PreparedMedium
from tilewright.models.qwen3_omni.config import AudioConfig, MediaTokens
from tilewright.models.qwen3_omni.processor import place
from tilewright.types import Medium, ModelInputs

AUDIO, AUDIO_START, AUDIO_END = 204, 205, 206
BINS = 16
POSITIONS_PER_SECOND = 13
TOKENS = MediaTokens(AUDIO, AUDIO_START, AUDIO_END, tiny.IMAGE, tiny.VIDEO, tiny.START, tiny.END)
SOUND = {
    "num_mel_bins": BINS,
    "encoder_layers": 2,
    "encoder_attention_heads": 5,  # a prime: no number of ranks divides it
    "encoder_ffn_dim": 100,
    "d_model": 60,
    "n_window": 50,  # transformers counts 13 features in a chunk, whatever the config says
    "n_window_infer": 200,  # two chunks of 100 frames
    "output_dim": 96,
    "downsample_hidden_size": 24,
    "max_source_positions": 13,
    "initializer_range": 0.15,
}
_TALKER_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "interleaved": True},
}
_PREDICTOR = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_code_groups": 4,
}
_CODE2WAV = {
    "codebook_size": 32,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_quantizers": 4,
    "decoder_dim": 32,
    "sliding_window": 8,
}


def config_of(*, vocab_size: int = tiny.VOCAB, tokens: MediaTokens = TOKENS, vision=None, sound=None, **extra):
    """transformers' config; the voice is as small as it can be: it is no part of these tests."""
    thinker = {
        "text_config": {
            **tiny.TEXT,
            **tiny.EXPERTS,
            "vocab_size": vocab_size,
            "head_dim": 32,
            "rope_parameters": tiny.MROPE,
        },
        "vision_config": {**tiny.VISION, **(vision or {})},
        "audio_config": {**SOUND, **(sound or {})},
        "audio_token_id": tokens.audio,
        "audio_start_token_id": tokens.audio_start,
        "audio_end_token_id": tokens.audio_end,
        "image_token_id": tokens.image,
        "video_token_id": tokens.video,
        "vision_start_token_id": tokens.vision_start,
        "vision_end_token_id": tokens.vision_end,
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": 2,
        **extra,
    }
    talker = {
        "text_config": _TALKER_TEXT,
        "code_predictor_config": _PREDICTOR,
        "num_code_groups": 4,
        "thinker_hidden_size": 96,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
        "speaker_id": {},  # and nobody speaks
    }
    return transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=talker, code2wav_config=_CODE2WAV, initializer_range=0.15
    )


def make_network(config=None) -> torch.nn.Module:
    """transformers' whole model in fp32 with weights of a size that lets every part matter."""
    torch.manual_seed(3)
    whole = transformers.Qwen3OmniMoeForConditionalGeneration(config or config_of()).eval()
    whole.thinker.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in whole.thinker.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
    return whole


@functools.cache
def audio_config() -> AudioConfig:
    return AudioConfig.from_dict(SOUND)


def prompt(network: torch.nn.Module, media: list[tuple], seed: int) -> tiny.Prompt:
    """Words, and between them media: ("image", grid), ("video", grid, seconds of a group), ("audio", mel frames),
    ("joined", grid, seconds of a group, mel frames), a video with its sound."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)

    def words() -> list[int]:
        return rng.integers(0, AUDIO, 5).tolist()

    ids, prepared, drawn, theirs = words(), [], {}, {"image": [], "video": [], "audio": []}
    for index, (kind, *sizes) in enumerate(media):
        if kind == "audio":
            ids += [AUDIO_START, AUDIO, AUDIO_END]
        else:
            ids += [tiny.START, tiny.IMAGE if kind == "image" else tiny.VIDEO, tiny.END]
        ids += words()
        sound = ()
        if kind in ("audio", "joined"):
            mel = torch.randn(sizes[-1], BINS, generator=generator)
            theirs["audio"].append(mel)
            sound = tuple(_pieces(mel, f"{seed}/{index}", drawn))
        if kind == "audio":
            prepared.append(PreparedMedium("audio", "audio", b"", sound[0].grid, 0, 0, None, sound=sound))
            continue
        grid, own = sizes[0], "image" if kind == "image" else "video"
        count, frames = grid[0] * grid[1] * grid[2], 1 if own == "image" else 2
        patches = torch.randn(count, 3, frames, 16, generator=generator)
        theirs[own].append((patches.expand(-1, -1, 2, -1).reshape(count, -1), grid, sizes[1] if len(sizes) > 1 else 0))
        key = f"{seed}/{index}".encode().rjust(16, b"-")
        times = tuple(group * sizes[1] for group in range(grid[0])) if own == "video" else ()
        medium = PreparedMedium(own, own, key, grid, count * frames, count, None, times, sound)
        drawn[key] = patches.reshape(-1, tiny.ROW_WIDTH)
        prepared.append(medium)
    placement = place(ids, prepared, TOKENS, audio_config(), merge_size=2, positions_per_second=POSITIONS_PER_SECOND)
    made = [
        Medium(medium.kind, medium.key, medium.grid, spans, tiny.UNWRITTEN, medium.encoder_rows)
        for medium, spans in placement.media
    ]
    rows = tiny.DrawnPatches([drawn[medium.key] for medium in made]) if made else None
    inputs = ModelInputs(tuple(placement.token_ids), placement.positions, placement.next_position, tuple(made), rows)
    is_joined = any(kind == "joined" for kind, *_ in media)
    return tiny.Prompt(inputs, _arguments(inputs.token_ids, theirs, is_joined))


def _pieces(mel: torch.Tensor, name: str, drawn: dict) -> list[PreparedMedium]:
    """The windows of a sound, each of them a medium of its own."""
    chunk, window, pieces = min(len(mel), 100), 200, []
    for begin in range(0, len(mel), window):
        part = mel[begin : begin + window]
        rows = -(-part.numel() // tiny.ROW_WIDTH)
        key = f"{name}/{begin}".encode().rjust(16, b"-")
        drawn[key] = torch.nn.functional.pad(part.flatten(), (0, rows * tiny.ROW_WIDTH - part.numel())).view(rows, -1)
        pieces.append(PreparedMedium("audio", "audio", key, (chunk, len(part), BINS), rows, rows, None))
    return pieces


def _arguments(ids, theirs: dict, is_joined: bool) -> dict:
    tokens = torch.tensor(ids)[None]
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if sounds := theirs["audio"]:
        longest = max(map(len, sounds))
        arguments["input_features"] = torch.stack(
            [torch.nn.functional.pad(mel.T, (0, longest - len(mel))) for mel in sounds]
        )
        lengths = torch.tensor([len(mel) for mel in sounds])
        arguments["feature_attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if theirs[kind]:
            arguments[name] = torch.cat([patches for patches, _, _ in theirs[kind]])
            arguments[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid, _ in theirs[kind]])
    if theirs["video"]:
        arguments["video_second_per_grid"] = torch.tensor([float(seconds) for _, _, seconds in theirs["video"]])
        arguments["use_audio_in_video"] = is_joined
    return arguments
