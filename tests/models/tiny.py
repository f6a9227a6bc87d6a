"""Tiny checkpoints with random weights of every family, as transformers saves them, and the same prompts for both."""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.mllama.image_processing_pil_mllama import (
    build_aspect_ratio_mask_np,
    convert_aspect_ratios_to_ids_np,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from tilewright.inputs.media_buffer import Allocation, MediaBuffer
from tilewright.models.protocol import MediaBatch
from tilewright.types import Medium, ModelInputs, Region, Span

IMAGE, VIDEO, START, END = 207, 208, 209, 210
VOCAB = 211
ROW_WIDTH = 48  # a patch of a picture: 3 channels of 4 x 4
UNWRITTEN = Region(0, 0)  # until `in_dtype`

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
VISION = {
    "depth": 3,
    "hidden_size": 72,  # three heads of 24: not a whole number of tiles
    "num_heads": 3,
    "intermediate_size": 100,
    "out_hidden_size": 96,
    "deepstack_visual_indexes": [0, 1],
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
    "in_channels": 3,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MLLAMA_TEXT = {"num_hidden_layers": 5, "cross_attention_layers": [1, 4], "pad_token_id": 0, "eos_token_id": 1}
MLLAMA_VISION = {
    "hidden_size": 72,
    "attention_heads": 3,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 216,
    "image_size": 16,  # 17 rows a tile, filled up to 24
    "patch_size": 4,
    "initializer_range": 0.15,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def _vision_language(config_class, text: dict, **extra):
    return config_class(
        text_config={**TEXT, "head_dim": 32, "rope_parameters": MROPE, **text},
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **extra,
    )


def _configs() -> dict[str, transformers.PreTrainedConfig]:
    return {
        "llama": transformers.LlamaConfig(**TEXT, rope_parameters=LLAMA3),
        "llama_tied_biased": transformers.LlamaConfig(
            **TEXT, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "qwen2": transformers.Qwen2Config(**TEXT),
        "qwen2_window": transformers.Qwen2Config(
            **TEXT, use_sliding_window=True, sliding_window=16, max_window_layers=1
        ),
        "qwen3": transformers.Qwen3Config(**TEXT, head_dim=40, tie_word_embeddings=True, rope_parameters=YARN),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **TEXT, **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]
        ),
        "qwen3_vl": _vision_language(transformers.Qwen3VLConfig, {}, tie_word_embeddings=True),
        "qwen3_vl_moe": _vision_language(transformers.Qwen3VLMoeConfig, EXPERTS, tie_word_embeddings=False),
        # The last layer is one that attends to pictures, and so is one in between.
        "mllama": transformers.MllamaConfig(
            text_config={**TEXT, **MLLAMA_TEXT, "rope_parameters": LLAMA3},
            vision_config=MLLAMA_VISION,
            image_token_index=VOCAB,
        ),
        # Layers that see a window and such that see all take turns; the window is longer than a page of the tests.
        "qwen3_window": transformers.Qwen3Config(
            **{**TEXT, "num_hidden_layers": 4},
            head_dim=32,
            use_sliding_window=True,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    }


CONFIGS = _configs()
FAMILIES = list(CONFIGS)
VISION_FAMILIES = [name for name in FAMILIES if "_vl" in name]
CROSS_FAMILIES = [name for name in FAMILIES if "mllama" in name]


def make_network(name: str) -> torch.nn.Module:
    """transformers' model in fp32 with weights of a size that lets every part matter."""
    return network_of(CONFIGS[name], seed=FAMILIES.index(name))


def network_of(config: transformers.PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """The same of any config."""
    torch.manual_seed(seed)
    mapping = (
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if hasattr(config, "vision_config")
        else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    network = mapping[type(config)](config).eval()
    network.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
        for parameter_name, parameter in network.named_parameters():
            if "gate" in parameter_name.rsplit(".", 1)[-1]:  # closed in a fresh network
                parameter.uniform_(0.5, 1.0)
    return network


def save(network: torch.nn.Module, folder: Path) -> Path:
    network.save_pretrained(folder)
    return folder


@dataclass
class Prompt:
    """One prompt for both: our inputs, and transformers' keyword arguments."""

    inputs: ModelInputs
    arguments: dict = field(default_factory=dict)


def text_prompt(length: int, seed: int, num_axes: int = 1) -> Prompt:
    ids = np.random.default_rng(seed).integers(0, IMAGE, length)
    positions = np.broadcast_to(np.arange(length), (num_axes, length)).astype(np.int64)
    return Prompt(ModelInputs(tuple(ids.tolist()), positions, length), {"input_ids": torch.tensor(ids)[None]})


def media_prompt(network: torch.nn.Module, media: list[tuple[str, tuple[int, int, int]]], seed: int) -> Prompt:
    """Words, each medium (kind, grid) with words after it; a video's frames have words between, as timestamps do."""
    rng = np.random.default_rng(seed)

    def words() -> list[int]:
        return rng.integers(0, IMAGE, 5).tolist()

    ids, made, drawn, pixels, types = words(), [], [], {"image": [], "video": []}, []
    for index, (kind, (frames, rows, columns)) in enumerate(media):
        spans = []
        for _ in range(frames):
            ids += [*words(), START] if kind == "video" else [START]
            length = rows * columns // 4
            spans.append(Span(len(ids), length))
            ids += [IMAGE if kind == "image" else VIDEO] * length + [END]
        ids += words()
        generator = torch.Generator().manual_seed(100 * seed + index)
        # A still has one frame here; transformers reads it twice.
        patches = torch.randn(frames * rows * columns, 3, 1 if kind == "image" else 2, 16, generator=generator)
        pixels[kind].append(patches.expand(-1, -1, 2, -1).reshape(len(patches), -1))
        key = f"{seed}/{index}".encode().rjust(16, b"-")
        drawn.append(patches.reshape(-1, ROW_WIDTH))
        made.append(Medium(kind, key, (frames, rows, columns), tuple(spans), UNWRITTEN, frames * rows * columns))
    tokens = torch.tensor(ids)
    types = torch.where(tokens == IMAGE, 1, torch.where(tokens == VIDEO, 2, 0))
    arguments = {"input_ids": tokens[None], "mm_token_type_ids": types[None].int()}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels[kind]:
            arguments[name] = torch.cat(pixels[kind])
            arguments[f"{kind}_grid_thw"] = torch.tensor([grid for other, grid in media if other == kind])
    grids = {name: value for name, value in arguments.items() if name.endswith("grid_thw")}
    positions, _ = network.model.get_rope_index(arguments["input_ids"], types[None].int(), **grids)
    positions = positions[:, 0].numpy().astype(np.int64)
    inputs = ModelInputs(tuple(ids), positions, int(positions.max()) + 1, tuple(made), DrawnPatches(drawn))
    return Prompt(inputs, arguments)


def cross_prompt(pieces: list[int | tuple[int, int]], seed: int) -> Prompt:
    """Numbers of words and (rows, columns) of the tiles of pictures, for a model with cross-attention."""
    rng = np.random.default_rng(seed)
    ids, media, drawn, tiles = [], [], [], []
    for piece in pieces:
        if isinstance(piece, int):
            ids += rng.integers(0, IMAGE, piece).tolist()
            continue
        num_tiles = piece[0] * piece[1]
        pixels = torch.randn(num_tiles, 3, 16, 16, generator=torch.Generator().manual_seed(100 * seed + len(media)))
        patches = pixels.view(num_tiles, 3, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(num_tiles * 16, 48)
        key = f"{seed}/{len(media)}".encode().rjust(16, b"-")
        place = Span(len(ids), 1)
        drawn.append(patches)
        media.append(Medium("image", key, (num_tiles, 4, 4), (place,), UNWRITTEN, 4 * 16, 17 * num_tiles, piece))
        tiles.append(pixels)
        ids.append(VOCAB)
    arguments = {"input_ids": torch.tensor(ids)[None]}
    if media:
        tilings = [[medium.tiling for medium in media]]
        arguments["pixel_values"] = torch.stack([torch.cat([t, torch.zeros(4 - len(t), 3, 16, 16)]) for t in tiles])[
            None
        ]
        arguments["aspect_ratio_ids"] = torch.from_numpy(convert_aspect_ratios_to_ids_np(tilings, 4))
        arguments["aspect_ratio_mask"] = torch.from_numpy(build_aspect_ratio_mask_np(tilings, 4))
        seen = [get_cross_attention_token_mask(ids, VOCAB)]
        mask = convert_sparse_cross_attention_mask_to_dense(seen, [[len(t) for t in tiles]], 4, len(ids))
        arguments["cross_attention_mask"] = torch.from_numpy(mask)
    positions = np.arange(len(ids), dtype=np.int64)[None]
    return Prompt(ModelInputs(tuple(ids), positions, len(ids), tuple(media), DrawnPatches(drawn)), arguments)


@contextlib.contextmanager
def blind_before_pictures(network: torch.nn.Module):
    """transformers with Meta's rule for tokens that see nothing: it masks attention's result of theirs as the MLP's.

    transformers masks the MLP's alone, so that those tokens see all pictures of the prompt, also such that come later.
    """
    hooks = []
    for layer in network.model.language_model.layers:
        if not hasattr(layer, "cross_attn"):
            continue

        def keep(layer, arguments, keywords):
            layer.cross_attn.row_mask = keywords["full_text_row_masked_out_mask"]

        def mask(attention, arguments, result):
            return result[0] * attention.row_mask[:, 0], result[1]

        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
        hooks.append(layer.cross_attn.register_forward_hook(mask))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class DrawnPatches:
    """What was drawn for the media of a prompt, and the memory that holds it in the dtype of a model."""

    rows: list[torch.Tensor]
    allocation: Allocation | None = None


@functools.cache
def media_buffer(dtype: torch.dtype) -> MediaBuffer:
    """The buffer of all tests with models of a dtype."""
    return MediaBuffer(ROW_WIDTH, dtype, 64 << 20)


def in_dtype(inputs: ModelInputs, dtype: torch.dtype) -> ModelInputs:
    """The inputs with their media in the buffer of a dtype, as long as they live."""
    if not inputs.media:
        return inputs
    buffer, rows = media_buffer(dtype), inputs.allocation.rows
    allocation = buffer.allocate([len(part) for part in rows])
    for region, part in zip(allocation.regions, rows, strict=True):
        buffer.view(region).copy_(part)
    media = [replace(medium, region=region) for medium, region in zip(inputs.media, allocation.regions, strict=True)]
    return replace(inputs, media=tuple(media), allocation=DrawnPatches(rows, allocation))


def encode(model, inputs: ModelInputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """The features of a prompt's media, from one pass of the model's encoder."""
    inputs = in_dtype(inputs, dtype)
    return model.encode(MediaBatch.of(media_buffer(dtype).rows, inputs.media))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
