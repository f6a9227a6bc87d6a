"""Models with random weights for benchmarks/accelerator.py: tiny ones of every family, and published shapes."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.models.registry import family_of
from tilewright.types import Medium, ModelInputs, Region, Span
from tilewright.weights.spec import iter_weights

TEXT = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
VISION = {
    "depth": 3,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 192,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0, 1],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
}
SOUND = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "n_window": 50,
    "n_window_infer": 200,
    "output_dim": 128,
    "downsample_hidden_size": 24,
    "max_source_positions": 13,
    "activation_function": "gelu",
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}
IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
SEEING_TEXT = {**TEXT, "rope_parameters": MROPE}
MLLAMA = {
    "model_type": "mllama",
    "image_token_index": 256,
    "text_config": {**TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
    "vision_config": {
        "hidden_size": 96,
        "attention_heads": 4,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_global_layers": 2,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 192,
        "image_size": 64,
        "patch_size": 16,
        "max_num_tiles": 4,
        "num_channels": 3,
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
    },
}
QWEN35_VISION = {key: value for key, value in VISION.items() if key != "deepstack_visual_indexes"}
CONFIGS: dict[str, dict] = {
    "llama": {"model_type": "llama", **TEXT},
    "qwen2": {"model_type": "qwen2", **TEXT},
    "qwen3": {"model_type": "qwen3", **TEXT},
    "qwen3_moe": {"model_type": "qwen3_moe", **TEXT, **EXPERTS},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": SEEING_TEXT, "vision_config": VISION, **IDS},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {**SEEING_TEXT, **EXPERTS},
        "vision_config": VISION,
        **IDS,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {**TEXT, **DELTA},
        "vision_config": QWEN35_VISION,
        **IDS,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {**TEXT, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
        "vision_config": QWEN35_VISION,
        **IDS,
    },
    "mllama": MLLAMA,
    "qwen3_omni": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {**SEEING_TEXT, **EXPERTS},
        "vision_config": VISION,
        "audio_config": SOUND,
        "audio_token_id": 247,
        "audio_start_token_id": 248,
        "audio_end_token_id": 249,
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        **IDS,
    },
}
SEEING = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mllama", "qwen3_omni")


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


@dataclass(frozen=True)
class _RandomReader:
    """A tensor of random values: the same on every device if it is made on the host, else made where it is used."""

    name: str
    shape: tuple[int, ...]
    device: torch.device | None  # None: on the host

    def read(self) -> torch.Tensor:
        return self.rows(0, self.shape[0]) if self.shape else torch.tensor(0.5)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        shape = (end - begin, *self.shape[1:])
        is_norm = "norm" in self.name and self.name.endswith("weight")
        fan_in = math.prod(self.shape[1:]) if len(self.shape) > 1 else 16
        if self.device is not None:
            values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            values.normal_(0, fan_in**-0.5, generator=_generator(self.device))
        else:
            seed = zlib.crc32(f"{self.name} {begin}".encode())
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * fan_in**-0.5
        return values * 0.1 + 1 if is_norm else values


def fill(model: object, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Random weights; how many bytes they take. `device`: where they are made, quickly; None: alike everywhere."""
    num_bytes = 0
    for weight in iter_weights(model):
        weight.fill([_RandomReader(source.name, source.shape, device) for source in weight.sources], dtype)
        num_bytes += sum(math.prod(source.shape) for source in weight.sources) * dtype.itemsize
    return num_bytes


def build(config: dict):
    return family_of(config).build(config, {})


def make_prompt(
    config: dict, buffer: MediaBuffer, num_axes: int, num_words: int, grids: Sequence[tuple[int, int]], seed: int
) -> ModelInputs:
    """Words, and an image of so many rows and columns of patches each; of tiles for a model with cross-attention."""
    rng = np.random.default_rng(seed)
    is_cross = config["model_type"] == "mllama"
    merge = 1 if is_cross else config["vision_config"]["spatial_merge_size"] if grids else 1
    ids, spans, counts = rng.integers(1, 240, num_words // 2).tolist(), [], []
    for rows, columns in grids:
        length = 1 if is_cross else rows * columns // merge**2
        spans.append(Span(len(ids), length))
        ids += [config.get("image_token_id", 256)] * length
        counts.append(rows * columns * 16 if is_cross else rows * columns)
    ids += rng.integers(1, 240, num_words - num_words // 2).tolist()
    allocation = buffer.allocate(counts) if counts else None
    media = []
    for i, grid in enumerate(grids):
        region: Region = allocation.regions[i]
        values = torch.randn(region.num_rows, buffer.rows.shape[1], generator=torch.Generator().manual_seed(seed + i))
        buffer.view(region).copy_(values)
        key = f"{seed}/{i}".encode().rjust(16, b"-")
        if is_cross:
            num_tiles = grid[0] * grid[1]
            media.append(
                Medium("image", key, (num_tiles, 4, 4), (spans[i],), region, 64, 17 * num_tiles, (grid[0], grid[1]))
            )
        else:
            media.append(Medium("image", key, (1, *grid), (spans[i],), region, region.num_rows))
    positions = np.broadcast_to(np.arange(len(ids), dtype=np.int64), (num_axes, len(ids))).copy()
    return ModelInputs(tuple(ids), positions, len(ids), tuple(media), allocation)
