"""Weights of Llama-3.2-Vision that are put together when they are loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.linear import PackedWeight
from tilewright.ops.memory import empty_in_huge_pages
from tilewright.ops.patch_embedding import pack_patch_embedding
from tilewright.weights.linear import LinearWeight, Part
from tilewright.weights.shard import Shard
from tilewright.weights.spec import Reader, Source, Weight, along


class PatchProjection(Weight[PackedWeight]):
    """A Conv2d [D, C, P, P] without a bias, whose stride is its kernel, as a packed linear; of it the rows `shard`."""

    def __init__(self, name: str, shape: tuple[int, int, int, int], shard: Shard) -> None:
        super().__init__([Source(f"{name}.weight", shape, (shard,))])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        self._value = pack_patch_embedding(readers[0].read(), still=True, dtype=dtype)


class PositionTables(Weight[Tensor]):
    """All that is added to the patches before the first layer, for each arrangement of tiles: [A, tiles, P, D].

    The embeddings of the class, of the place within a tile, of the tile, and of the place in the arrangement are one
    sum, made in fp32 and rounded once. Row 0 of a tile is its class token, which the tile's own embedding leaves out.
    It takes no more memory than the largest of its parts. Of D this rank has `shard`.
    """

    def __init__(
        self, name: str, num_arrangements: int, num_tiles: int, num_patches: int, width: int, shard: Shard
    ) -> None:
        places, tiles = f"{name}.gated_positional_embedding", f"{name}.pre_tile_positional_embedding"
        sources = [
            Source(f"{name}.class_embedding", (width,)),
            Source(f"{places}.gate", (1,)),
            Source(f"{places}.embedding", (num_patches, width)),
            Source(f"{places}.tile_embedding.weight", (num_arrangements, num_tiles * num_patches * width)),
            Source(f"{tiles}.gate", (1,)),
            Source(f"{tiles}.embedding.weight", (num_arrangements, num_tiles * width)),
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
        super().__init__([Source(f"{name}.embedding.weight", shape), Source(f"{name}.gate", (1,))])
        self.num_tiles = num_tiles

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        table, gate = (reader.read().float() for reader in readers)
        value = (table * gate.tanh()).view(len(table), self.num_tiles, -1)
        self._value = value.contiguous().to(backend.device())


class MapProjectorWeight(LinearWeight):
    """A linear over feature maps side by side: the last one, then `num_inner` inner ones.

    The checkpoint's columns of the inner maps go by element, all maps of the first element first; ours go map by map.
    """

    def __init__(self, name: str, rows: int, width: int, num_inner: int, *, bias: bool, shard: Shard) -> None:
        super().__init__([Part(name, rows, shard)], width * (1 + num_inner), bias=bias)
        self.width, self.num_inner = width, num_inner

    def keep_numbers(self, formats: Sequence[tuple[str, int] | None]) -> None:
        """None are kept: columns that share a scale do not stay together."""

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
