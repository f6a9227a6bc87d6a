"""What a model needs from a checkpoint: each weight says which tensors it is made of and how they are laid out.

Layers hold `Weight`s as attributes; `weights.load` finds them (`iter_weights`), checks all their sources against the
checkpoint at once, and fills `value` one weight at a time, from blocks of rows where it can, so that no more than the
packed model and one tensor are in memory.
A weight shared by two layers (a tied head) is one object, and is loaded once.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.linear import PACK_BLOCK_BYTES, PackedWeight, pack_weight_rows
from tilewright.ops.memory import empty_in_huge_pages
from tilewright.ops.moe import PackedExperts
from tilewright.ops.patch_embedding import pack_patch_embedding

Value = TypeVar("Value")


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, and the shape it must have."""

    name: str
    shape: tuple[int, ...]


class Reader(Protocol):
    """A source as it is read: bf16 or fp32, whatever the file has."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """All of it."""

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of its first axis. The memory of earlier rows may be given back: copy what is kept."""


class Weight(ABC, Generic[Value]):
    """A weight of the model: where it comes from, and its value once it is loaded.

    Attributes beside the value are plain (numbers, strings, tuples of them): with the class they are the `recipe`.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._value: Value | None = None

    @property
    def value(self) -> Value:
        assert self._value is not None, f"{self.sources[0].name} is not loaded"
        return self._value

    @abstractmethod
    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        """Makes the value from the sources, in their order. The value keeps none of their memory."""

    def build(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        """The same from tensors in memory."""
        self.build_from([_InMemory(tensor) for tensor in tensors], dtype)

    def restore(self, value: Value) -> None:
        """Takes a value that a weight of the same recipe had."""
        self._value = value

    @property
    def recipe(self) -> str:
        """All that the value depends on but the sources' contents and the dtype: same recipe, same value."""
        settings = {name: value for name, value in sorted(vars(self).items()) if name not in ("_value", "sources")}
        for name, setting in settings.items():
            if not _is_plain(setting):
                raise TypeError(f"{type(self).__name__}.{name} is {setting!r}, expected numbers, strings or tuples")
        return f"{type(self).__qualname__} {settings} {[astuple(source) for source in self.sources]}"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class _InMemory:
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> Tensor:
        return self.tensor

    def rows(self, begin: int, end: int) -> Tensor:
        return self.tensor[begin:end]


class Unpacked(Weight[Tensor]):
    """A tensor as it is: norms, position tables, an embedding table that is not tied.

    `in_fp32`: in fp32 whatever the model is in, for the few values that steer many.
    """

    def __init__(self, name: str, *shape: int, in_fp32: bool = False) -> None:
        super().__init__([Source(name, shape)])
        self.in_fp32 = in_fp32

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        (reader,) = readers
        if self.in_fp32:
            dtype = torch.float32
        value = empty_in_huge_pages(math.prod(reader.shape), dtype).view(reader.shape)
        if not reader.shape:
            value.copy_(reader.read())
        else:
            block_rows = max(PACK_BLOCK_BYTES // max(math.prod(reader.shape[1:]) * 4, 1), 1)
            for begin in range(0, reader.shape[0], block_rows):
                end = min(begin + block_rows, reader.shape[0])
                value[begin:end] = reader.rows(begin, end)
        self._value = value


class Linear(Weight[PackedWeight]):
    """A packed weight [sum of rows, columns]; parts are stacked, so that q, k and v or gate and up are one product.

    `parts` are (name without ".weight", rows). `gated`: two parts, gate then up. `tanh_scale` names a scalar [1] whose
    tanh multiplies the result; it is multiplied into weight and bias in fp32, which are rounded once.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        *,
        bias: bool = False,
        gated: bool = False,
        tanh_scale: str | None = None,
    ) -> None:
        weights = [Source(f"{name}.weight", (rows, columns)) for name, rows in parts]
        biases = [Source(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        super().__init__(weights + biases + ([Source(tanh_scale, (1,))] if tanh_scale else []))
        self.num_parts = len(parts)
        self.gated = gated
        self.has_bias = bias
        self.is_scaled = tanh_scale is not None

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        scale = readers[-1].read().float().tanh() if self.is_scaled else None
        weights, others = readers[: self.num_parts], readers[self.num_parts :]
        biases = others[: self.num_parts] if self.has_bias else ()
        bias = torch.cat([item.read().float() for item in biases]) if biases else None
        self._value = pack_weight_rows(
            lambda begin, end: _scaled(_stacked_rows(weights, begin, end), scale),
            sum(weight.shape[0] for weight in weights),
            weights[0].shape[1],
            None if bias is None else _scaled(bias, scale),
            gated=self.gated,
            dtype=dtype,
        )


def _scaled(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return tensor if scale is None else tensor.float() * scale


def _stacked_rows(parts: Sequence[Reader], begin: int, end: int) -> Tensor:
    """Rows [begin, end) of the parts stacked: one part's own where no boundary lies between."""
    pieces = []
    for part in parts:
        num_rows = part.shape[0]
        if begin < num_rows and end > 0:
            pieces.append(part.rows(max(begin, 0), min(end, num_rows)))
        begin, end = begin - num_rows, end - num_rows
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True)
class PatchWeights:
    """The patch embedding for stills, with the kernel summed over time, and for video."""

    still: PackedWeight
    video: PackedWeight


class PatchEmbedding(Weight[PatchWeights]):
    """A Conv3d [D, C, frames, P, P] with a bias [D], as packed linears."""

    def __init__(self, name: str, shape: tuple[int, int, int, int, int]) -> None:
        super().__init__([Source(f"{name}.weight", shape), Source(f"{name}.bias", shape[:1])])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        weight, bias = (reader.read() for reader in readers)
        self._value = PatchWeights(
            still=pack_patch_embedding(weight, bias, still=True, dtype=dtype),
            video=pack_patch_embedding(weight, bias, still=False, dtype=dtype),
        )


class ConvTaps(Weight[Tensor]):
    """A convolution over time of each channel for itself, [C, 1, W] in the checkpoint, as [W, C]."""

    def __init__(self, name: str, channels: int, taps: int) -> None:
        super().__init__([Source(f"{name}.weight", (channels, 1, taps))])

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        self._value = readers[0].read()[:, 0].t().to(backend.device(), dtype).contiguous()


class ExpertFormat(str, enum.Enum):
    """How a checkpoint keeps the experts of a layer."""

    separate = "a tensor per expert and projection"
    stacked = "[E, outputs, inputs]"
    stacked_transposed = "[E, inputs, outputs]"


class Experts(Weight[PackedExperts]):
    """The packed weights [rows, columns] of every expert of a layer, in one block of memory.

    `parts` name the projections of one expert where they are kept apart (gate then up, or one), `stacked_name` the
    tensor that holds all of them.
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
    ) -> None:
        if stored is ExpertFormat.separate:
            shape = (rows // len(parts), columns)
            sources = [Source(f"{name}.{e}.{part}.weight", shape) for e in range(num_experts) for part in parts]
        else:
            order = (rows, columns) if stored is ExpertFormat.stacked else (columns, rows)
            sources = [Source(f"{name}.{stacked_name}", (num_experts, *order))]
        super().__init__(sources)
        self.num_experts, self.rows, self.columns = num_experts, rows, columns
        self.num_parts, self.stored = len(parts), stored

    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        packed = PackedExperts.empty(self.num_experts, self.rows, self.columns, self.num_parts == 2, dtype)
        for expert in range(self.num_experts):
            packed.pack(expert, self._weight_of(expert, readers))
        self._value = packed

    def _weight_of(self, expert: int, readers: Sequence[Reader]) -> Tensor:
        if self.stored is ExpertFormat.separate:
            first = expert * self.num_parts
            return torch.cat([reader.read() for reader in readers[first : first + self.num_parts]])
        weight = readers[0].rows(expert, expert + 1)[0]
        return weight.t().contiguous() if self.stored is ExpertFormat.stacked_transposed else weight


def iter_weights(part: object) -> Iterator[Weight]:
    """Every weight of a model, once each, in the order in which its layers name them."""
    seen: set[int] = set()

    def visit(part: object) -> Iterator[Weight]:
        if isinstance(part, Weight):
            if id(part) not in seen:
                seen.add(id(part))
                yield part
        elif isinstance(part, (list, tuple)):
            for item in part:
                yield from visit(item)
        elif type(part).__module__.startswith("tilewright.") and hasattr(part, "__dict__"):
            for item in vars(part).values():
                yield from visit(item)

    return visit(part)
