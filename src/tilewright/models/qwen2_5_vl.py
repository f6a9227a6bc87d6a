"""Qwen2.5-VL as Qwen-Image's text encoder: the vision tower, and hidden states of prompts with images.

N: patches of all images, ordered by merged squares. Most blocks attend within windows of an image, a few within all
of it: patches are sorted by window once, so that a window's patches are contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import UncachedBatch, starts_of
from tilewright.layers.decoder import DecoderConfig
from tilewright.layers.linear import Linear, PatchEmbedding
from tilewright.layers.mlp import GatedMlp, activation_named
from tilewright.layers.norm import RmsNorm
from tilewright.models.qwen3_vl.vision import patch_places
from tilewright.models.text_config import Config, head_width, integer, model_width
from tilewright.models.text_encoders.decoder_encoder import DecoderEncoder, text_side
from tilewright.ops import backend
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import rope_qk, rope_table, vision_axes
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig
from tilewright.weights.spec import stacked

EPS = 1e-6
ROPE_THETA = 10000.0

Grid = tuple[int, int]  # rows and columns of an image's patches


@dataclass(frozen=True)
class WindowedVisionConfig:
    width: int
    mlp_width: int
    depth: int
    num_heads: int
    head_width: int
    output_width: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    num_channels: int
    window_size: int  # in pixels
    whole_layers: tuple[int, ...]  # layers that attend to the whole image
    activation: str

    @classmethod
    def from_dict(cls, config: Config) -> WindowedVisionConfig:
        width, num_heads = model_width(config), integer(config, "num_heads", 16)
        patch_size, merge_size = integer(config, "patch_size", 14), integer(config, "spatial_merge_size", 2)
        window_size, merged = integer(config, "window_size", 112), patch_size * merge_size
        if window_size < merged:
            raise UnsupportedConfig(f"vision_config has window_size {window_size}, expected {merged} or more")
        each_head = head_width(config, width, num_heads)
        if each_head % 4:
            raise UnsupportedConfig(f"vision_config has heads of {each_head}, expected a multiple of 4: it turns pairs")
        whole = config.get("fullatt_block_indexes", (7, 15, 23, 31))
        if not isinstance(whole, (list, tuple)):
            raise UnsupportedConfig(f"vision_config has fullatt_block_indexes {whole!r}, expected a list of layers")
        return cls(
            width=width,
            mlp_width=integer(config, "intermediate_size", 3420),
            depth=integer(config, "depth", 32),
            num_heads=num_heads,
            head_width=each_head,
            output_width=integer(config, "out_hidden_size", 3584),
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=integer(config, "temporal_patch_size", 2),
            num_channels=integer(config, "in_channels", integer(config, "in_chans", 3)),
            window_size=window_size,
            whole_layers=tuple(whole),
            activation=activation_named(str(config.get("hidden_act", "silu"))),
        )

    @property
    def window_side(self) -> int:
        """Merged patches along a window's side."""
        return self.window_size // (self.patch_size * self.merge_size)


class WindowedBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)), updating x."""

    def __init__(self, name: str, config: WindowedVisionConfig) -> None:
        self.head_width = config.head_width
        width, total = config.width, config.num_heads * config.head_width
        heads = partition.current().heads("vision", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        self.norm1, self.norm2 = RmsNorm(f"{name}.norm1", width, EPS), RmsNorm(f"{name}.norm2", width, EPS)
        # q, k and v are stored as one tensor; a rank has rows of each.
        self.qkv = Linear([(f"{name}.attn.qkv", 3 * total, stacked(rows, total, 3))], width, bias=True)
        self.output = Linear([(f"{name}.attn.proj", width)], total, column_shard=rows, bias=True)
        self.mlp = GatedMlp(f"{name}.mlp", width, config.mlp_width, activation=config.activation, bias=True)

    def __call__(self, x_ND: Tensor, starts: Tensor, cos: Tensor, sin: Tensor) -> None:
        qkv = self.qkv(self.norm1(x_ND)).view(len(x_ND), 3 * self.num_heads, self.head_width)
        q, k, v = qkv.split(self.num_heads, dim=1)
        rope_qk(q, k, cos, sin)
        self.output(varlen_attention(q, k, v, starts).view(len(x_ND), -1), residual=x_ND, out=x_ND)
        self.mlp(x_ND, self.norm2(x_ND))


class WindowedVisionTower:
    def __init__(self, name: str, config: WindowedVisionConfig) -> None:
        self.config = config
        patch, merged = config.patch_size, config.width * config.merge_size**2
        shape = config.width, config.num_channels, config.temporal_patch_size, patch, patch
        self.patch_embedding = PatchEmbedding(f"{name}.patch_embed.proj", shape, bias=False)
        self.blocks = [WindowedBlock(f"{name}.blocks.{i}", config) for i in range(config.depth)]
        self.merger_norm = RmsNorm(f"{name}.merger.ln_q", config.width, EPS)
        inner = partition.current().width("merged patches", merged)
        self.merger_in = Linear([(f"{name}.merger.mlp.0", merged, inner)], merged, bias=True)
        self.merger_out = Linear([(f"{name}.merger.mlp.2", config.output_width)], merged, column_shard=inner, bias=True)
        frequencies = config.head_width // 4
        inv_freq = 1.0 / ROPE_THETA ** (torch.arange(frequencies, dtype=torch.float32) / frequencies)
        self.inv_freq = inv_freq.repeat(2).to(backend.device())
        self.rope_axes = vision_axes(frequencies).to(backend.device())

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.dtype

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return features [N / merged, output width] of the patches [N, 3 P P] of images, in their order."""
        config = self.config
        x_ND = empty((len(patches), config.width), self.dtype)
        self.patch_embedding(patches.to(self.dtype), is_still=True, out=x_ND)
        order, lengths = windows_of(grids, config)
        order, unit = order.to(x_ND.device), config.merge_size**2
        x_ND = x_ND.view(len(order), -1)[order].view(x_ND.shape)
        places = torch.cat([patch_places((1, *grid), config.merge_size, x_ND.device) for grid in grids], dim=1)
        cos, sin = (
            table.view(len(order), -1)[order].view(table.shape)
            for table in rope_table(places, self.inv_freq, self.rope_axes)
        )
        within = starts_of(unit * length for length in lengths)
        whole = starts_of(rows * columns for rows, columns in grids)
        for i, block in enumerate(self.blocks):
            with scope():
                block(x_ND, whole if i in config.whole_layers else within, cos, sin)
        merged = self.merger_norm(x_ND).view(len(order), -1)
        features = self.merger_out(self.merger_in(merged, activation="gelu_erf"))
        return torch.empty_like(features).index_copy_(0, order, features)


def windows_of(grids: Sequence[Grid], config: WindowedVisionConfig) -> tuple[Tensor, list[int]]:
    """Return the indices of the merged patches of all images, window by window, int64, and each window's length."""
    order: list[Tensor] = []
    lengths: list[int] = []
    first, side = 0, config.window_side
    for rows, columns in ((rows // config.merge_size, columns // config.merge_size) for rows, columns in grids):
        numbers = first + torch.arange(rows * columns).view(rows, columns)
        for top, left in itertools.product(range(0, rows, side), range(0, columns, side)):
            window = numbers[top : top + side, left : left + side].flatten()
            order.append(window)
            lengths.append(len(window))
        first += rows * columns
    return torch.cat(order), lengths


MODEL_TYPES = ("qwen2_5_vl",)


class SeeingEncoder(DecoderEncoder):
    """A `DecoderEncoder` with the vision tower of its checkpoint."""

    def __init__(self, config: DecoderConfig, vision: WindowedVisionConfig, image_token: int) -> None:
        super().__init__(config)
        self.vision = WindowedVisionTower("visual", vision)
        self.image_token = image_token

    def checkpoint_name(self, name: str) -> str | None:
        inner = name.removeprefix("model.")
        return inner if inner.startswith("visual.") else super().checkpoint_name(name)

    def encode_seeing(self, token_ids: Sequence[int], patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the hidden states [L, D] of a prompt with a run of an image's tokens for each of the grids.

        `patches` [N, 3 P P] are those of all images.
        """
        merge = self.vision.config.merge_size
        sizes = [(rows // merge, columns // merge) for rows, columns in grids]
        x_TD = self._embedded([token_ids])
        is_image = torch.tensor(token_ids, device=x_TD.device) == self.image_token
        x_TD[is_image] = self.vision(patches, grids).to(x_TD.dtype)
        positions = image_positions(token_ids, self.image_token, sizes)
        return self._states(x_TD, positions, UncachedBatch(starts_of([len(token_ids)])))


def image_positions(token_ids: Sequence[int], image_token: int, sizes: Sequence[Grid]) -> Tensor:
    """Return time, row and column of each token, int64 [3, L]; an image's start at the text's position before it.

    `sizes` are the rows and columns of each image's features, whose tokens are a run in the prompt. The text after an
    image continues from its largest position.
    """
    parts: list[Tensor] = []
    at, next_position, left = 0, 0, list(sizes)
    while at < len(token_ids):
        if token_ids[at] != image_token:
            parts.append(torch.full((3, 1), next_position))
            at, next_position = at + 1, next_position + 1
            continue
        rows, columns = left.pop(0)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        place = torch.stack([torch.zeros_like(row), row, column]).flatten(1)
        parts.append(next_position + place)
        at, next_position = at + rows * columns, next_position + max(rows, columns)
    return torch.cat(parts, dim=1)


def build(config: Mapping[str, Any]) -> SeeingEncoder:
    """Return the encoder with vision tower that a text encoder's config.json describes."""
    vision = config.get("vision_config")
    if config.get("model_type") not in MODEL_TYPES or not isinstance(vision, Mapping):
        raise UnsupportedConfig(
            f"model_type is {config.get('model_type')!r}, expected {' or '.join(MODEL_TYPES)} with a vision_config"
        )
    tower, text = WindowedVisionConfig.from_dict(vision), text_side(config)
    if tower.output_width != text.width:
        raise UnsupportedConfig(f"vision_config has out_hidden_size {tower.output_width}, expected {text.width}")
    return SeeingEncoder(text, tower, integer(config, "image_token_id", 151655))
