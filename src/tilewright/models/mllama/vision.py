"""The vision tower of Llama-3.2-Vision: the tiles of an image in, encoder states that text attends to out.

N: patches of all tiles, each tile's class token first. An image is padded to the largest number of tiles, and each
tile to a multiple of 8 rows. Two rows of padding do not attend to each other, any other two do. So the image's own
rows come first and padding after them: the former attend to all keys, padding to the former, and attention is two calls
without a mask. Padding cannot be left out: the image's rows attend to it. Some weights are combined from several
tensors when they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import starts_of
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.mlp import activation_named
from tilewright.layers.norm import LayerNorm
from tilewright.models.protocol import MediaBatch, MediaItem
from tilewright.models.text_config import Config, head_width, integer, number
from tilewright.ops import backend
from tilewright.ops.attention import varlen_attention
from tilewright.ops.linear import PackedWeight
from tilewright.ops.media import pack_patch_embedding
from tilewright.ops.norm import layer_norm
from tilewright.ops.plan import empty, empty_in_huge_pages, scope
from tilewright.ops.quantized import QuantFormat
from tilewright.types import UnsupportedConfig
from tilewright.weights.linear import LinearPart, LinearWeight
from tilewright.weights.spec import Reader, Shard, Weight, WeightSource, along


class PatchProjection(Weight[PackedWeight]):
    """A Conv2d [D, C, P, P] without bias, whose stride is its kernel, as a packed linear; its rows `shard`."""

    def __init__(self, name: str, shape: tuple[int, int, int, int], shard: Shard) -> None:
        super().__init__([WeightSource(f"{name}.weight", shape, (shard,))])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        self._value = pack_patch_embedding(readers[0].read(), still=True, dtype=dtype)


class PositionTables(Weight[Tensor]):
    """All that is added to the patches before the first layer, for each arrangement of tiles: [A, tiles, P, D].

    The embeddings of the class, of the position within a tile, of the tile, and of the position in the arrangement are
    one sum, computed in fp32 and rounded once. Row 0 of a tile is its class token, without the tile's own embedding. It
    takes no more memory than its largest part. This rank has `shard` of D.
    """

    def __init__(
        self, name: str, num_arrangements: int, num_tiles: int, num_patches: int, width: int, shard: Shard
    ) -> None:
        places, tiles = f"{name}.gated_positional_embedding", f"{name}.pre_tile_positional_embedding"
        sources = [
            WeightSource(f"{name}.class_embedding", (width,)),
            WeightSource(f"{places}.gate", (1,)),
            WeightSource(f"{places}.embedding", (num_patches, width)),
            WeightSource(f"{places}.tile_embedding.weight", (num_arrangements, num_tiles * num_patches * width)),
            WeightSource(f"{tiles}.gate", (1,)),
            WeightSource(f"{tiles}.embedding.weight", (num_arrangements, num_tiles * width)),
        ]
        super().__init__(sources)
        self.shape = (num_arrangements, num_tiles, num_patches, width)
        self.column_runs = shard.runs

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        class_D, place_gate, place_PD, tile_gate = (readers[i].read().float() for i in (0, 1, 2, 4))
        arrangements, tiles, patches, width = self.shape
        share = place_gate.tanh()
        common_PD = (1 - share) * place_PD
        common_PD[0] += class_D
        columns = Shard(self.column_runs)
        shape = (arrangements, tiles, patches, columns.length)
        value = empty_in_huge_pages(math.prod(shape), dtype).view(shape)
        for index in range(arrangements):
            place = readers[3].rows(index, index + 1).float().view(tiles, patches, width)
            tile = readers[5].rows(index, index + 1).float().view(tiles, 1, width)
            total = share * place + common_PD
            total[:, 1:] += tile_gate.tanh() * tile
            value[index] = along(total, 2, columns)
        self._value = value


class TileTable(Weight[Tensor]):
    """An embedding of each tile of each arrangement, times the tanh of its gate: fp32 [A, tiles, D]."""

    def __init__(self, name: str, num_arrangements: int, num_tiles: int, width: int) -> None:
        shape = (num_arrangements, num_tiles * width)
        super().__init__([WeightSource(f"{name}.embedding.weight", shape), WeightSource(f"{name}.gate", (1,))])
        self.num_tiles = num_tiles

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        table, gate = (reader.read().float() for reader in readers)
        value = (table * gate.tanh()).view(len(table), self.num_tiles, -1)
        self._value = value.contiguous().to(backend.device())


class MapProjectorWeight(LinearWeight):
    """A linear over concatenated feature maps: the last one, then `num_inner` inner ones.

    The checkpoint orders the inner maps' columns by element, all maps of the first element first; we order them by map.
    """

    def __init__(self, name: str, rows: int, width: int, num_inner: int, *, bias: bool, shard: Shard) -> None:
        super().__init__([LinearPart(name, rows, shard)], width * (1 + num_inner), bias=bias)
        self.width, self.num_inner = width, num_inner

    def keep_quants(self, formats: Sequence[QuantFormat | None]) -> None:
        """Ignore the quants: columns that share a scale do not stay together."""

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, *biases = readers
        super().build_from([_ByMap(weight, self.width, self.num_inner), *biases], dtype)


@dataclass(frozen=True)
class _ByMap:
    reader: Reader
    width: int
    num_inner: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.shape

    def read(self) -> Tensor:
        return self._by_map(self.reader.read())

    def rows(self, begin: int, end: int) -> Tensor:
        return self._by_map(self.reader.rows(begin, end))

    def _by_map(self, weight: Tensor) -> Tensor:
        inner = weight[:, self.width :].unflatten(1, (self.width, self.num_inner)).transpose(1, 2).flatten(1)
        return torch.cat([weight[:, : self.width], inner], dim=1)


OUTER_EPS = 1e-5  # of the norms before and after the layers; the config's norm_eps is for those inside
ROW_MULTIPLE = 8  # a tile is padded to a multiple of this


@dataclass(frozen=True)
class MllamaVisionConfig:
    width: int
    mlp_width: int
    num_local_layers: int
    num_global_layers: int
    num_heads: int
    head_width: int
    tile_size: int  # pixels on a side
    patch_size: int
    num_channels: int
    max_tiles: int
    inner_maps: tuple[int, ...]  # local layers whose outputs are part of the result, beside the last one's
    activation: str
    eps: float

    @classmethod
    def from_dict(cls, config: Config) -> MllamaVisionConfig:
        width = integer(config, "hidden_size")
        inner_maps = config.get("intermediate_layers_indices")
        num_local_layers = integer(config, "num_hidden_layers")
        if not isinstance(inner_maps, (list, tuple)) or not all(i in range(num_local_layers) for i in inner_maps):
            raise UnsupportedConfig(
                f"vision_config has intermediate_layers_indices {inner_maps!r}, expected some of its layers, 0 to "
                f"{num_local_layers - 1}"
            )
        output_width = width * (1 + len(inner_maps))
        if integer(config, "vision_output_dim") != output_width:
            raise UnsupportedConfig(
                f"vision_config has vision_output_dim {config['vision_output_dim']}, expected {output_width}: "
                f"hidden_size {width} for the last layer and each of intermediate_layers_indices"
            )
        return cls(
            width=width,
            mlp_width=integer(config, "intermediate_size"),
            num_local_layers=num_local_layers,
            num_global_layers=integer(config, "num_global_layers"),
            num_heads=integer(config, "attention_heads"),
            head_width=head_width(config, width, integer(config, "attention_heads")),
            tile_size=integer(config, "image_size"),
            patch_size=integer(config, "patch_size"),
            num_channels=integer(config, "num_channels", 3),
            max_tiles=integer(config, "max_num_tiles"),
            inner_maps=tuple(inner_maps),
            activation=activation_named(str(config.get("hidden_act", "gelu"))),
            eps=number(config, "norm_eps", 1e-5),
        )

    @property
    def attention_width(self) -> int:
        """Width of the concatenated heads."""
        return self.num_heads * self.head_width

    @property
    def rows_per_tile(self) -> int:
        """Patches of a tile, and its class token."""
        return (self.tile_size // self.patch_size) ** 2 + 1


def arrangements(max_tiles: int) -> list[tuple[int, int]]:
    """Return every (rows, columns) of tiles for an image. The id of one is its index in the list, plus 1."""
    sides = range(1, max_tiles + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]


@dataclass(frozen=True)
class TileRows:
    """Rows of each tile: `num_tiles` tiles of the image, their padding, then tiles of padding."""

    num_tiles: int
    max_tiles: int
    per_tile: int

    @property
    def num_real(self) -> int:
        return self.num_tiles * self.per_tile

    @property
    def num_padding(self) -> int:
        """Padding rows of one tile."""
        return -self.per_tile % ROW_MULTIPLE

    @property
    def total(self) -> int:
        return self.max_tiles * (self.per_tile + self.num_padding)

    def filled(self, tile: int) -> slice:
        """Return the rows of a tile's class token and patches, which may be padding."""
        if tile < self.num_tiles:
            return slice(tile * self.per_tile, (tile + 1) * self.per_tile)
        begin = tile * (self.per_tile + self.num_padding)
        return slice(begin, begin + self.per_tile)

    def filling(self, tile: int) -> slice:
        """Return the padding rows of a tile."""
        begin = self.num_real + tile * self.num_padding if tile < self.num_tiles else self.filled(tile).stop
        return slice(begin, begin + self.num_padding)


class VisionLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), updating x; both scaled by the tanh of a gate if `is_gated`."""

    def __init__(self, name: str, config: MllamaVisionConfig, biases: frozenset[str], *, is_gated: bool) -> None:
        self.config = config
        width = config.width
        self.norm1 = _norm(f"{name}.input_layernorm", width, config.eps, biases)
        own = partition.current()
        heads = own.heads("vision", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows, attention_width = heads.queries.times(config.head_width), config.attention_width
        self.qkv = Linear([(f"{name}.self_attn.{part}_proj", attention_width, rows) for part in "qkv"], width)
        attention_gate, mlp_gate = (f"{name}.gate_attn", f"{name}.gate_ffn") if is_gated else (None, None)
        self.output = Linear(
            [(f"{name}.self_attn.o_proj", width)], attention_width, column_shard=rows, tanh_scale=attention_gate
        )
        self.norm2 = _norm(f"{name}.post_attention_layernorm", width, config.eps, biases)
        fc1, fc2 = f"{name}.mlp.fc1", f"{name}.mlp.fc2"
        inner = own.width("vision MLP width", config.mlp_width)
        self.mlp_in = Linear([(fc1, config.mlp_width, inner)], width, bias=f"{fc1}.bias" in biases)
        self.mlp_out = Linear(
            [(fc2, width)], config.mlp_width, column_shard=inner, bias=f"{fc2}.bias" in biases, tanh_scale=mlp_gate
        )

    def __call__(self, x_ND: Tensor, num_real: int, num_wanted: int) -> None:
        """Update the first `num_wanted` rows, which are all or those of the image."""
        heads = self.num_heads
        qkv = self.qkv(self.norm1(x_ND)).view(len(x_ND), 3 * heads, self.config.head_width)
        q, k, v = qkv.split(heads, dim=1)
        attended = empty((num_wanted, heads, self.config.head_width), x_ND.dtype)
        _attend(q[:num_real], k, v, attended[:num_real])
        _attend(q[num_real:num_wanted], k[:num_real], v[:num_real], attended[num_real:])
        x_ND = x_ND[:num_wanted]
        self.output(attended.view(num_wanted, -1), residual=x_ND, out=x_ND)
        inner = self.mlp_in(self.norm2(x_ND), activation=self.config.activation)
        self.mlp_out(inner, residual=x_ND, out=x_ND)


def _norm(name: str, width: int, eps: float, biases: frozenset[str]) -> LayerNorm:
    return LayerNorm(name, width, eps, bias=f"{name}.bias" in biases)


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Compute attention of every query to every key."""
    if len(q):
        starts = [starts_of([len(tensor)]) for tensor in (q, k)]
        varlen_attention(q, k, v, *starts, out=out)


class MllamaVisionTower:
    """The vision tower; layers have a bias if it is among the checkpoint's `biases`."""

    def __init__(
        self, name: str, projector_name: str, config: MllamaVisionConfig, output_width: int, biases: frozenset[str]
    ) -> None:
        self.config = config
        width, tiles = config.width, config.max_tiles
        self.arrangements = tuple(arrangements(tiles))
        num_ids = 1 + len(self.arrangements)  # id 0: no image
        patch = config.patch_size
        own = partition.current()
        self._group, columns = own.group, own.width("patch embedding", width)
        shape = (width, config.num_channels, patch, patch)
        self.patches = GatheredLinear(PatchProjection(f"{name}.patch_embedding", shape, columns), width, columns)
        self.positions = PositionTables(name, num_ids, tiles, config.rows_per_tile, width, columns)
        self.norm_before = _norm(f"{name}.layernorm_pre", width, OUTER_EPS, biases)
        self.local_layers = [
            VisionLayer(f"{name}.transformer.layers.{i}", config, biases, is_gated=False)
            for i in range(config.num_local_layers)
        ]
        self.norm_between = _norm(f"{name}.layernorm_post", width, OUTER_EPS, biases)
        self.tile_table = TileTable(f"{name}.post_tile_positional_embedding", num_ids, tiles, width)
        self.global_layers = [
            VisionLayer(f"{name}.global_transformer.layers.{i}", config, biases, is_gated=True)
            for i in range(config.num_global_layers)
        ]
        has_bias = f"{projector_name}.bias" in biases
        rows = own.width("vision output", output_width)
        projector = MapProjectorWeight(
            projector_name, output_width, width, len(config.inner_maps), bias=has_bias, shard=rows
        )
        self.projector = GatheredLinear(projector, output_width, rows)

    def __call__(self, batch: MediaBatch) -> list[Tensor]:
        """Return the states [tiles * rows per tile, output width] of each image.

        One by one: an image with its padding is 6,432 rows, more at once gain nothing.
        """
        return [self._encode(item, batch.rows([item])) for item in batch.items]

    def _encode(self, item: MediaItem, patches: Tensor) -> Tensor:
        config = self.config
        rows = TileRows(item.tiling[0] * item.tiling[1], config.max_tiles, config.rows_per_tile)
        positions = self.positions.value
        states = torch.empty(rows.num_real, self.projector.width, dtype=positions.dtype, device=positions.device)
        arrangement = 1 + self.arrangements.index(item.tiling)
        with scope():
            maps = empty((rows.num_real, config.width * (1 + len(config.inner_maps))), states.dtype)
            last_map, *inner_maps = maps.split(config.width, dim=1)
            x_ND = self._embed(patches, rows, arrangement)
            for i, layer in enumerate(self.local_layers):
                with scope():
                    layer(x_ND, rows.num_real, rows.total)
                for index, kept in zip(config.inner_maps, inner_maps, strict=True):
                    if index == i:
                        kept.copy_(x_ND[: rows.num_real])
            self._norm_between(x_ND, rows, arrangement)
            for i, layer in enumerate(self.global_layers):
                with scope():
                    is_last = i == len(self.global_layers) - 1  # the last layer's padding is not read
                    layer(x_ND, rows.num_real, rows.num_real if is_last else rows.total)
            last_map.copy_(x_ND[: rows.num_real])
            self.projector(maps, out=states)
        return states

    def _embed(self, patches: Tensor, rows: TileRows, arrangement: int) -> Tensor:
        """Return patches with their positions, normed [N, D]; padding tiles are black, padding rows of a tile zero."""
        positions = self._positions_of(arrangement)
        x_ND = empty((rows.total, self.config.width), positions.dtype)
        with scope():
            # One product for all tiles; in x class tokens lie between them.
            embedded = empty((rows.num_tiles, rows.per_tile - 1, self.config.width), positions.dtype)
            embedded[:] = positions[: rows.num_tiles, 1:]
            flat = embedded.view(-1, self.config.width)
            self.patches(patches, residual=flat, out=flat)
            for tile, position_PD in enumerate(positions):
                part = x_ND[rows.filled(tile)]
                self.norm_before(position_PD[:1], out=part[:1])
                self.norm_before(embedded[tile] if tile < rows.num_tiles else position_PD[1:], out=part[1:])
                x_ND[rows.filling(tile)].zero_()
        return x_ND

    def _positions_of(self, arrangement: int) -> Tensor:
        """Return the position table [tiles, P, D] of an arrangement, gathered from the ranks' columns."""
        own = self.positions.value[arrangement]
        if self._group.size == 1:
            return own
        return self._group.all_gather(own, dim=-1, out=empty((*own.shape[:2], self.config.width), own.dtype))

    def _norm_between(self, x_ND: Tensor, rows: TileRows, arrangement: int) -> None:
        """Norm x in place and add the embedding of its tile to every row, as part of the norm's bias."""
        norm = self.norm_between
        for tile, part in self._parts(x_ND, rows):
            bias = self.tile_table.value[arrangement, tile]
            if norm.bias is not None:
                bias = bias + norm.bias.value.float()
            layer_norm(part, norm.weight.value, bias.to(x_ND.dtype), norm.eps, out=part)

    def _parts(self, x_ND: Tensor, rows: TileRows) -> Iterator[tuple[int, Tensor]]:
        for tile in range(rows.max_tiles):
            yield tile, x_ND[rows.filled(tile)]
            yield tile, x_ND[rows.filling(tile)]
