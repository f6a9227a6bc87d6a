"""Weights packed for the linear kernels: single products, and the experts of a layer in one block of memory."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.ops.linear import PackedWeight, pack_weight_rows
from tilewright.ops.media import pack_patch_embedding
from tilewright.ops.moe import PackedExperts
from tilewright.ops.packed import weight_format
from tilewright.ops.quantized import QuantFormat, Quantized, concatenate
from tilewright.weights.gguf.quants import common_format, in_format
from tilewright.weights.spec import QuantizedReader, Reader, Shard, Weight, WeightSource, stacked

_log = logging.getLogger(__name__)


class LinearPart(NamedTuple):
    """A weight of the checkpoint that is a part of a fused one."""

    name: str  # without ".weight"
    rows: int
    shard: Shard | None = None  # this rank's rows; None: all


class LinearWeight(Weight[PackedWeight]):
    """A packed weight [sum of rows, columns]; its parts are stacked, so that q, k and v or gate and up are one product.

    `column_shard` are this rank's columns, `bias_shard` its part of the bias if it differs from that of the rows.
    `gated`: two parts, gate then up. `tanh_scale` names a scalar [1] whose tanh multiplies the result, `row_scale` a
    vector [rows] that does; they are folded into weight and bias in fp32, which are rounded once. `quantized_as` is a
    format and its group size (`ops.packed.weight_format`); None: the model's own type.
    """

    def __init__(
        self,
        parts: Sequence[LinearPart | tuple[str, int] | tuple[str, int, Shard]],
        columns: int,
        *,
        column_shard: Shard | None = None,
        bias: bool = False,
        bias_shard: Shard | None = None,
        gated: bool = False,
        tanh_scale: str | None = None,
        row_scale: str | None = None,
        quantized_as: QuantFormat | None = None,
    ) -> None:
        assert tanh_scale is None or row_scale is None, "a weight has one scale"
        named = [LinearPart(*part) for part in parts]
        weights = [
            WeightSource(f"{name}.weight", (rows, columns), (shard, column_shard)) for name, rows, shard in named
        ]
        biases = (
            [WeightSource(f"{name}.bias", (rows,), (bias_shard or shard,)) for name, rows, shard in named]
            if bias
            else []
        )
        scales = [WeightSource(tanh_scale, (1,))] if tanh_scale else []
        if row_scale:
            ((_, rows, shard),) = named
            scales = [WeightSource(row_scale, (rows,), (shard,))]
        super().__init__(weights + biases + scales)
        self.num_parts = len(parts)
        self.gated = gated
        self.has_bias = bias
        self.is_scaled = bool(scales)
        self.has_row_scale = row_scale is not None
        self.quantized_as = quantized_as
        self.keeps_quants = False  # the checkpoint's quants are kept, instead of rounding their values
        self.pieces: tuple[tuple[int, QuantFormat | None], ...] = ()  # runs of parts with one format each

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        scale = readers[-1].read().float() if self.is_scaled else None
        if scale is not None and not self.has_row_scale:
            scale = scale.tanh()
        weights, others = readers[: self.num_parts], readers[self.num_parts :]
        biases = others[: self.num_parts] if self.has_bias else ()
        value: PackedWeight | None = None
        end = self.num_parts
        for count, quantized_as in reversed(self.pieces or ((end, self.quantized_as),)):
            own, own_biases = weights[end - count : end], biases[end - count : end]
            packed = self._packed(own, own_biases, quantized_as, scale, dtype)
            value, end = replace(packed, next=value), end - count
        self._value = value

    def _packed(
        self,
        weights: Sequence[Reader],
        biases: Sequence[Reader],
        quantized_as: QuantFormat | None,
        scale: Tensor | None,
        dtype: torch.dtype,
    ) -> PackedWeight:
        """Pack parts that have one format."""
        bias = torch.cat([item.read().float() for item in biases]) if biases else None

        def rows(begin: int, end: int) -> Tensor | Quantized:
            if self.keeps_quants and quantized_as is not None:
                return _stacked_quants(weights, begin, end, quantized_as)
            scales = scale[begin:end, None] if scale is not None and self.has_row_scale else scale
            return _scaled(_stacked_rows(weights, begin, end), scales)

        return pack_weight_rows(
            rows,
            sum(weight.shape[0] for weight in weights),
            weights[0].shape[1],
            None if bias is None else _scaled(bias, scale),
            gated=self.gated,
            dtype=dtype if quantized_as is None else weight_format(*quantized_as),
            row_dtype=dtype,
        )

    def keep_quants(self, formats: Sequence[QuantFormat | None]) -> None:
        own = list(formats[: self.num_parts])
        if self.quantized_as is not None or self.is_scaled or not any(own):
            return
        pieces = _runs(own)
        if len(pieces) == 1:
            self.quantized_as, self.keeps_quants = pieces[0][1], True
        elif self.gated:
            names = ", ".join(source.name for source in self.sources[: self.num_parts])
            _log.warning("%s are one product but not in one format: widened", names)
        else:
            self.pieces, self.keeps_quants = pieces, True


def _runs(formats: Sequence[QuantFormat | None]) -> tuple[tuple[int, QuantFormat | None], ...]:
    """Return how many consecutive parts are one product, and its format, which must hold the quants of all of them."""
    runs: list[tuple[int, QuantFormat | None]] = []
    for format in formats:
        if runs:
            count, before = runs[-1]
            both = None if format is None or before is None else common_format([before, format])
            if both is not None or format is before is None:
                runs[-1] = count + 1, both
                continue
        runs.append((1, format))
    return tuple(runs)


def _scaled(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return tensor if scale is None else tensor.float() * scale


def _stacked_rows(parts: Sequence[Reader], begin: int, end: int) -> Tensor:
    """Return rows [begin, end) of the stacked parts: a part's own rows if they are all within it."""
    pieces = [part.rows(first, last) for part, first, last in _pieces(parts, begin, end)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _stacked_quants(parts: Sequence[Reader], begin: int, end: int, format: QuantFormat) -> Quantized:
    """Return rows [begin, end) of the stacked parts, as quants in a format that holds those of all parts."""
    pieces = [
        cast(QuantizedReader, part).quantized_rows(first, last) for part, first, last in _pieces(parts, begin, end)
    ]
    try:
        return concatenate([in_format(piece, format) for piece in pieces])
    except ValueError as error:
        raise CheckpointError(f"a weight of {format[0]} cannot be packed: {error}") from error


def _pieces(parts: Sequence[Reader], begin: int, end: int) -> Iterator[tuple[Reader, int, int]]:
    """Yield each part that has some of the rows [begin, end) of the stack, with the part's own range of them."""
    for part in parts:
        num_rows = part.shape[0]
        if begin < num_rows and end > 0:
            yield part, max(begin, 0), min(end, num_rows)
        begin, end = begin - num_rows, end - num_rows


@dataclass(frozen=True)
class PatchWeights:
    """The patch embedding for stills, with the kernel summed over time, and for video."""

    still: PackedWeight
    video: PackedWeight


class PatchWeight(Weight[PatchWeights]):
    """A Conv3d [D, C, frames, P, P] with or without bias [D], as packed linears; `shard`: this rank's rows."""

    def __init__(
        self, name: str, shape: tuple[int, int, int, int, int], shard: Shard | None = None, *, bias: bool = True
    ) -> None:
        biases = [WeightSource(f"{name}.bias", shape[:1], (shard,))] if bias else []
        super().__init__([WeightSource(f"{name}.weight", shape, (shard,)), *biases])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, *biases = (reader.read() for reader in readers)
        bias = biases[0] if biases else None
        self._value = PatchWeights(
            still=pack_patch_embedding(weight, bias, still=True, dtype=dtype),
            video=pack_patch_embedding(weight, bias, still=False, dtype=dtype),
        )


class ExpertStorage(str, enum.Enum):
    """The layout of a layer's experts in a checkpoint."""

    separate = "a tensor per expert and projection"
    stacked = "[E, outputs, inputs]"
    stacked_transposed = "[E, inputs, outputs]"


class ExpertsWeight(Weight[PackedExperts]):
    """Packed weights [rows, columns] of every expert of a layer, in one block of memory.

    `parts` name the projections of one expert if experts are stored separately (gate then up, or one), `stacked_name`
    the tensor that holds all of them. This rank has the rows `part_shard` of each part, and the columns `column_shard`.
    `quantized_as` is as in LinearWeight.
    """

    def __init__(
        self,
        name: str,
        parts: tuple[str, ...],
        stacked_name: str,
        num_experts: int,
        rows: int,
        columns: int,
        stored: ExpertStorage,
        *,
        part_shard: Shard | None = None,
        column_shard: Shard | None = None,
        quantized_as: QuantFormat | None = None,
    ) -> None:
        part_rows = rows // len(parts)
        if stored is ExpertStorage.separate:
            shape, shards = (part_rows, columns), (part_shard, column_shard)
            sources = [
                WeightSource(f"{name}.{e}.{part}.weight", shape, shards) for e in range(num_experts) for part in parts
            ]
        else:
            axes = [(rows, part_shard and stacked(part_shard, part_rows, len(parts))), (columns, column_shard)]
            if stored is ExpertStorage.stacked_transposed:
                axes.reverse()
            (first, first_shard), (second, second_shard) = axes
            sources = [
                WeightSource(f"{name}.{stacked_name}", (num_experts, first, second), (None, first_shard, second_shard))
            ]
        super().__init__(sources)
        self.num_experts = num_experts
        self.rows = rows if part_shard is None else part_shard.length * len(parts)
        self.columns = columns if column_shard is None else column_shard.length
        self.num_parts, self.stored = len(parts), stored
        self.quantized_as = quantized_as
        self.keeps_quants = False  # as in LinearWeight

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        packed = PackedExperts.empty(
            self.num_experts,
            self.rows,
            self.columns,
            self.num_parts == 2,
            dtype if self.quantized_as is None else weight_format(*self.quantized_as),
        )
        for expert in range(self.num_experts):
            packed.pack(expert, self._quants_of(expert, readers) or self._weight_of(expert, readers))
        self._value = packed

    def keep_quants(self, formats: Sequence[QuantFormat | None]) -> None:
        own = {format for format in formats if format is not None}
        if self.quantized_as is None and self.stored is ExpertStorage.separate and own and None not in formats:
            self.quantized_as = common_format(list(own))
            self.keeps_quants = self.quantized_as is not None

    def _quants_of(self, expert: int, readers: Sequence[Reader]) -> Quantized | None:
        """Return an expert's weight as the checkpoint's own quants; None if they are not kept."""
        if not self.keeps_quants or self.quantized_as is None:
            return None
        first, parts = expert * self.num_parts, []
        for reader in readers[first : first + self.num_parts]:
            quants = cast(QuantizedReader, reader).quantized_rows(0, reader.shape[0])
            parts.append(in_format(quants, self.quantized_as))
        return concatenate(parts)

    def _weight_of(self, expert: int, readers: Sequence[Reader]) -> Tensor:
        if self.stored is ExpertStorage.separate:
            first = expert * self.num_parts
            return torch.cat([reader.read() for reader in readers[first : first + self.num_parts]])
        weight = readers[0].rows(expert, expert + 1)[0]
        return weight.t().contiguous() if self.stored is ExpertStorage.stacked_transposed else weight
