"""The weights of a layer's experts, packed in one block of memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.moe import PackedExperts
from tilewright.ops.packed import weight_format
from tilewright.weights.shard import Shard, stacked
from tilewright.weights.spec import Reader, Source, Weight


class ExpertFormat(str, enum.Enum):
    """How a checkpoint keeps the experts of a layer."""

    separate = "a tensor per expert and projection"
    stacked = "[E, outputs, inputs]"
    stacked_transposed = "[E, inputs, outputs]"


class ExpertsWeight(Weight[PackedExperts]):
    """The packed weights [rows, columns] of every expert of a layer, in one block of memory.

    `parts` name the projections of one expert where they are kept apart (gate then up, or one), `stacked_name` the
    tensor that holds all of them. Of each part this rank has the rows `part_shard`, of the columns `column_shard`.
    `quantized_as` is as of a LinearWeight.
    """

    def __init__(
        self,
        name: str,
        parts: tuple[str, ...],
        stacked_name: str,
        num_experts: int,
        rows: int,
        columns: int,
        stored: ExpertFormat,
        *,
        part_shard: Shard | None = None,
        column_shard: Shard | None = None,
        quantized_as: tuple[str, int] | None = None,
    ) -> None:
        part_rows = rows // len(parts)
        if stored is ExpertFormat.separate:
            shape, shards = (part_rows, columns), (part_shard, column_shard)
            sources = [Source(f"{name}.{e}.{part}.weight", shape, shards) for e in range(num_experts) for part in parts]
        else:
            axes = [(rows, part_shard and stacked(part_shard, part_rows, len(parts))), (columns, column_shard)]
            if stored is ExpertFormat.stacked_transposed:
                axes.reverse()
            (first, first_shard), (second, second_shard) = axes
            sources = [
                Source(f"{name}.{stacked_name}", (num_experts, first, second), (None, first_shard, second_shard))
            ]
        super().__init__(sources)
        self.num_experts = num_experts
        self.rows = rows if part_shard is None else part_shard.length * len(parts)
        self.columns = columns if column_shard is None else column_shard.length
        self.num_parts, self.stored = len(parts), stored
        self.quantized_as = quantized_as

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        packed = PackedExperts.empty(
            self.num_experts,
            self.rows,
            self.columns,
            self.num_parts == 2,
            dtype if self.quantized_as is None else weight_format(*self.quantized_as),
        )
        for expert in range(self.num_experts):
            packed.pack(expert, self._weight_of(expert, readers))
        self._value = packed

    def _weight_of(self, expert: int, readers: Sequence[Reader]) -> Tensor:
        if self.stored is ExpertFormat.separate:
            first = expert * self.num_parts
            return torch.cat([reader.read() for reader in readers[first : first + self.num_parts]])
        weight = readers[0].rows(expert, expert + 1)[0]
        return weight.t().contiguous() if self.stored is ExpertFormat.stacked_transposed else weight
