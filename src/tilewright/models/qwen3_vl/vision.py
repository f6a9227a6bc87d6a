"""The vision tower of Qwen3-VL: patches of several images and videos in, features of each out, in one pass.

N: patches of all media, ordered by merged squares of 2 x 2. Attention stays within a frame.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import starts_of
from tilewright.layers.linear import Linear, PatchEmbedding
from tilewright.layers.mlp import activation_named
from tilewright.layers.norm import LayerNorm
from tilewright.models.protocol import MediaBatch, MediaItem
from tilewright.models.text_config import Config, head_width, integer, model_width
from tilewright.ops import backend
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import rope_qk, rope_table, vision_axes
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig
from tilewright.weights.conv import Unpacked
from tilewright.weights.spec import stacked

EPS = 1e-6
ROPE_THETA = 10000.0
# Grids whose position embeddings are cached: 9 MB each for an image of 1024 x 1024 in the largest tower.
MAX_CACHED_GRIDS = 8


@dataclass(frozen=True)
class VisionConfig:
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
    positions_per_side: int
    deepstack_layers: tuple[int, ...]
    activation: str

    @classmethod
    def from_dict(cls, config: Config) -> VisionConfig:
        width, depth, num_heads = model_width(config), integer(config, "depth"), integer(config, "num_heads")
        each_head = head_width(config, width, num_heads)
        if each_head % 4:
            raise UnsupportedConfig(f"vision_config has heads of {each_head}, expected a multiple of 4: it turns pairs")
        return cls(
            width=width,
            mlp_width=integer(config, "intermediate_size"),
            depth=depth,
            num_heads=num_heads,
            head_width=each_head,
            output_width=integer(config, "out_hidden_size"),
            patch_size=integer(config, "patch_size"),
            merge_size=integer(config, "spatial_merge_size"),
            temporal_patch_size=integer(config, "temporal_patch_size"),
            num_channels=integer(config, "in_channels", 3),
            positions_per_side=round(integer(config, "num_position_embeddings") ** 0.5),
            deepstack_layers=_deepstack_layers(config, depth),
            activation=activation_named(str(config.get("hidden_act", "gelu_pytorch_tanh"))),
        )

    @property
    def attention_width(self) -> int:
        """Width of the concatenated heads."""
        return self.num_heads * self.head_width

    @property
    def num_outputs(self) -> int:
        """Feature maps per medium: the tower's own and one per deepstack layer."""
        return 1 + len(self.deepstack_layers)


def _deepstack_layers(config: Config, depth: int) -> tuple[int, ...]:
    layers = config.get("deepstack_visual_indexes") or ()
    if (
        not isinstance(layers, (list, tuple))
        or len(set(layers)) != len(layers)
        or not all(layer in range(depth) for layer in layers)
    ):
        raise UnsupportedConfig(
            f"vision_config has deepstack_visual_indexes {layers!r}, expected some of its layers, 0 to {depth - 1}"
        )
    return tuple(layers)


class VisionBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)), updating x."""

    def __init__(self, name: str, config: VisionConfig) -> None:
        self.config = config
        width = config.width
        self.norm1 = LayerNorm(f"{name}.norm1", width, EPS)
        own = partition.current()
        heads = own.heads("vision", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows, attention_width = heads.queries.times(config.head_width), config.attention_width
        # q, k and v are stored as one tensor; a rank has rows of each.
        qkv = (f"{name}.attn.qkv", 3 * attention_width, stacked(rows, attention_width, 3))
        self.qkv = Linear([qkv], width, bias=True)
        self.output = Linear([(f"{name}.attn.proj", width)], attention_width, column_shard=rows, bias=True)
        self.norm2 = LayerNorm(f"{name}.norm2", width, EPS)
        inner = own.width("vision MLP width", config.mlp_width)
        self.mlp_in = Linear([(f"{name}.mlp.linear_fc1", config.mlp_width, inner)], width, bias=True)
        self.mlp_out = Linear([(f"{name}.mlp.linear_fc2", width)], config.mlp_width, column_shard=inner, bias=True)

    def __call__(self, x_ND: Tensor, frame_starts: Tensor, longest: int, cos: Tensor, sin: Tensor) -> None:
        heads = self.num_heads
        qkv = self.qkv(self.norm1(x_ND)).view(len(x_ND), 3 * heads, self.config.head_width)
        q, k, v = qkv.split(heads, dim=1)
        rope_qk(q, k, cos, sin)
        attended = varlen_attention(q, k, v, frame_starts, max_length=longest)
        self.output(attended.view(len(x_ND), -1), residual=x_ND, out=x_ND)
        inner = self.mlp_in(self.norm2(x_ND), activation=self.config.activation)
        self.mlp_out(inner, residual=x_ND, out=x_ND)


class PatchMerger:
    """Features of merged patches; deepstack mergers norm the merged vector, the last one each patch."""

    def __init__(self, name: str, config: VisionConfig, *, norm_merged: bool) -> None:
        self.merged_width = config.width * config.merge_size**2
        self.norm_merged = norm_merged
        self.norm = LayerNorm(f"{name}.norm", self.merged_width if norm_merged else config.width, EPS)
        merged = self.merged_width
        inner = partition.current().width("merged patches", merged)
        self.fc1 = Linear([(f"{name}.linear_fc1", merged, inner)], merged, bias=True)
        self.fc2 = Linear([(f"{name}.linear_fc2", config.output_width)], merged, column_shard=inner, bias=True)

    def __call__(self, x_ND: Tensor, out: Tensor) -> None:
        normed = self.norm(x_ND.view(-1, self.merged_width) if self.norm_merged else x_ND)
        inner = self.fc1(normed.view(-1, self.merged_width), activation="gelu_erf")
        self.fc2(inner, out=out)


class VisionTower:
    def __init__(self, name: str, config: VisionConfig) -> None:
        self.config = config
        patch, channels, frames = config.patch_size, config.num_channels, config.temporal_patch_size
        self.patch_embedding = PatchEmbedding(
            f"{name}.patch_embed.proj", (config.width, channels, frames, patch, patch)
        )
        self.positions = Unpacked(f"{name}.pos_embed.weight", config.positions_per_side**2, config.width)
        self.blocks = [VisionBlock(f"{name}.blocks.{i}", config) for i in range(config.depth)]
        self.merger = PatchMerger(f"{name}.merger", config, norm_merged=False)
        self.deepstack_mergers = [
            PatchMerger(f"{name}.deepstack_merger_list.{i}", config, norm_merged=True)
            for i in range(len(config.deepstack_layers))
        ]
        frequencies = config.head_width // 4
        inv_freq = 1.0 / ROPE_THETA ** (torch.arange(frequencies, dtype=torch.float32) / frequencies)
        self.inv_freq = inv_freq.repeat(2).to(backend.device())
        self.rope_axes = vision_axes(frequencies).to(backend.device())
        self.position_embedding = functools.lru_cache(MAX_CACHED_GRIDS)(self._position_embedding)

    def __call__(self, batch: MediaBatch) -> list[Tensor]:
        """Return features [n, (1 + deepstack layers) * output width] of each medium: its own, then each layer's."""
        config = self.config
        # Items of a kind together, in buffer order: contiguous ones are multiplied in place.
        order = sorted(range(len(batch.items)), key=lambda i: (batch.items[i].kind, batch.items[i].first_row))
        items = [batch.items[i] for i in order]
        x_ND = self._embed_patches(batch, items)
        frames = [rows * columns for frames, rows, columns in (item.grid for item in items) for _ in range(frames)]
        frame_starts, longest = starts_of(frames), max(frames)
        places = torch.cat([patch_places(item.grid, config.merge_size, x_ND.device) for item in items], dim=1)
        cos, sin = rope_table(places, self.inv_freq, self.rope_axes)
        num_features, width = len(x_ND) // config.merge_size**2, config.output_width
        features = torch.empty(num_features, config.num_outputs * width, dtype=x_ND.dtype, device=x_ND.device)
        outputs = features.split(width, dim=1)
        # Mergers follow the order of the config's list, the decoder's layers the depth of the features.
        mergers = dict(zip(config.deepstack_layers, self.deepstack_mergers, strict=True))
        taken = dict(zip(sorted(mergers), outputs[1:], strict=True))
        for i, block in enumerate(self.blocks):
            with scope():
                block(x_ND, frame_starts, longest, cos, sin)
                if i in mergers:
                    mergers[i](x_ND, taken[i])
        self.merger(x_ND, outputs[0])
        of_item = dict(zip(order, features.split([item.num_features for item in items]), strict=True))
        return [of_item[i] for i in range(len(order))]

    def _embed_patches(self, batch: MediaBatch, items: Sequence[MediaItem]) -> Tensor:
        """Return patch and position embeddings [N, D] of items sorted by kind: one product for each kind of weight."""
        x_ND = empty((sum(math.prod(item.grid) for item in items), self.config.width), self.patch_embedding.dtype)
        first = 0
        for kind, group in itertools.groupby(items, key=lambda item: item.kind):
            of_kind = list(group)
            end = first
            for item in of_kind:
                frames, rows, columns = item.grid
                begin, end = end, end + math.prod(item.grid)
                x_ND[begin:end].view(frames, rows * columns, -1)[:] = self.position_embedding(rows, columns)
            is_still = kind == "image"
            frames_of_group = 1 if is_still else self.config.temporal_patch_size
            patches = batch.rows(of_kind).view(end - first, frames_of_group * batch.buffer.shape[1])
            self.patch_embedding(patches, is_still=is_still, residual=x_ND[first:end], out=x_ND[first:end])
            first = end
        return x_ND

    def _position_embedding(self, rows: int, columns: int) -> Tensor:
        """Return the square table of learned positions, resampled bilinearly to a grid: [rows * columns, D]."""
        side = self.config.positions_per_side
        table = self.positions.value.view(side, side, -1)
        place = patch_places((1, rows, columns), self.config.merge_size, table.device)
        result = torch.zeros(rows * columns, self.config.width, device=table.device)
        for row, row_share in _taps(place[0], rows, side):
            for column, column_share in _taps(place[1], columns, side):
                result += table[row, column].float() * (row_share * column_share)[:, None]
        return result.to(table.dtype)


def _taps(place: Tensor, count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the two table entries around each of `count` points on a line of `side`, corners aligned, with weights."""
    at = torch.linspace(0, side - 1, count, device=place.device)[place]
    low = at.long()
    share = at - low
    return [(low, 1 - share), ((low + 1).clamp(max=side - 1), share)]


def patch_places(grid: tuple[int, int, int], merge_size: int, device: torch.device | None = None) -> Tensor:
    """Return row and column of each patch, int64 [2, N], ordered by squares of merge_size x merge_size."""
    frames, rows, columns = grid
    lines = torch.arange(rows, device=device), torch.arange(columns, device=device)
    place = torch.stack(torch.meshgrid(*lines, indexing="ij"))
    place = place.view(2, rows // merge_size, merge_size, columns // merge_size, merge_size)
    return place.transpose(2, 3).reshape(2, -1).repeat(1, frames)
