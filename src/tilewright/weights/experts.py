"""The weights of a layer's experts, packed in one block of memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tilewright.ops.moe import PackedExperts
from tilewright.ops.packed import weight_format
from tilewright.ops.quantized import Quantized, concatenate
from tilewright.weights.gguf_numbers import common_format, in_format
from tilewright.weights.shard import Shard, stacked
from tilewright.weights.spec import QuantizedReader, Reader, Source, Weight


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
        self.keeps_numbers = False  # as of a LinearWeight

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        packed = PackedExperts.empty(
            self.num_experts,
            self.rows,
            self.columns,
            self.num_parts == 2,
            dtype if self.quantized_as is None else weight_format(*self.quantized_as),
        )
        for expert in range(self.num_experts):
            packed.pack(expert, self._numbers_of(expert, readers) or self._weight_of(expert, readers))
        self._value = packed

    def keep_numbers(self, formats: Sequence[tuple[str, int] | None]) -> None:
        own = {format for format in formats if format is not None}
        if self.quantized_as is None and self.stored is ExpertFormat.separate and own and None not in formats:
            self.quantized_as = common_format(list(own))
            self.keeps_numbers = self.quantized_as is not None

    def _numbers_of(self, expert: int, readers: Sequence[Reader]) -> Quantized | None:
        """An expert's weight as the checkpoint's own numbers, where those are kept."""
        if not self.keeps_numbers or self.quantized_as is None:
            return None
        first, parts = expert * self.num_parts, []
        for reader in readers[first : first + self.num_parts]:
            numbers = cast(QuantizedReader, reader).quantized_rows(0, reader.shape[0])
            parts.append(in_format(numbers, self.quantized_as))
        return concatenate(parts)

    def _weight_of(self, expert: int, readers: Sequence[Reader]) -> Tensor:
        if self.stored is ExpertFormat.separate:
            first = expert * self.num_parts
            return torch.cat([reader.read() for reader in readers[first : first + self.num_parts]])
        weight = readers[0].rows(expert, expert + 1)[0]
        return weight.t().contiguous() if self.stored is ExpertFormat.stacked_transposed else weight
