"""Quantised linears of safetensors checkpoints, as the quants, scales and zeros that kernels multiply.

Each is a weight [n, k] of which some rows at a time are read. Quants are the checkpoint's own. Scales of groups are
converted to fp16: fp16 ones are unchanged, others have a relative error of at most 2^-11, and bf16 ones are exact from
2^-17 on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.ops.quantized import GROUP_SIZES, QuantFormat, Quantized, group_sizes, stored_scale

# Group size for rows with one scale in a format that has only groups: few scales, and ranks can split rows there.
_GROUPS_OF_ROWS = 128
# AWQ's order: index among eight neighbours of each nibble of an int32, from the lowest on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Tensors:
    """The tensors of one module of a checkpoint, by the suffixes of their names."""

    def __init__(self, module: str, read: Callable[[str], Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
        self.module, self._read, self.shapes = module, read, shapes

    def __contains__(self, end: str) -> bool:
        return end in self.shapes

    def __getitem__(self, end: str) -> Tensor:
        if end not in self.shapes:
            raise CheckpointError(f"{self.module} has no tensor {end}, which its quantised weight needs")
        return self._read(f"{self.module}.{end}")

    def expect(self, end: str, shape: tuple[int, ...]) -> None:
        if self.shapes.get(end) != shape:
            found = list(self.shapes[end]) if end in self.shapes else "missing"
            raise CheckpointError(f"{self.module}.{end} is {found}, expected {list(shape)}")


class StoredLinear(ABC):
    """A weight [n, k] of a module."""

    shape: tuple[int, int]
    format: QuantFormat

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    @abstractmethod
    def rows(self, begin: int, end: int) -> Quantized:
        """Return rows [begin, end)."""

    def _quantized(
        self, values: Tensor, scales: Tensor, zeros: Tensor | None = None, columns: Tensor | None = None
    ) -> Quantized:
        """Return quants in the module's format.

        scales [rows, groups of the checkpoint] are repeated if our groups are smaller.
        """
        name, size = self.format
        k = self.shape[1]
        num_groups = -(-k // size) if size else 1
        if scales.shape[1] != num_groups:
            times = -(-num_groups // scales.shape[1])
            scales = scales.repeat_interleave(times, 1)[:, :num_groups]
            zeros = None if zeros is None else zeros.repeat_interleave(times, 1)[:, :num_groups]
        try:
            kept = stored_scale(scales.float(), name, size).contiguous()
        except ValueError as error:
            raise CheckpointError(f"{self.tensors.module}: {error}") from error
        return Quantized(
            name, values, kept, None if zeros is None else zeros.to(kept.dtype).contiguous(), size, columns
        )


def grouped_format(module: str, name: str, k: int, group_size: int) -> QuantFormat:
    """Return a format with the checkpoint's groups, or with smaller ones that divide them."""
    sizes = group_sizes(name)
    if group_size == -1 or group_size > k:
        return name, 0 if 0 in sizes else _GROUPS_OF_ROWS
    if group_size > 0 and group_size in sizes:
        return name, group_size
    if group_size > 0 and group_size % GROUP_SIZES[-1] == 0:
        return name, GROUP_SIZES[-1]
    known = ", ".join(str(size) for size in sizes if size)
    raise CheckpointError(
        f"{module} has groups of {group_size} values, which {name} does not support: expected {known}"
    )


def unpacked_ints(packed: Tensor, bits: int) -> Tensor:
    """Return the quants of int32s [..., m], from the lowest bits on: uint8 [..., m * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


class Bytes(StoredLinear):
    """compressed-tensors, int-quantized: int8 [n, k] and scales [n, groups], or a single scale."""

    def __init__(self, tensors: Tensors, rounds_x: bool, group_size: int) -> None:
        super().__init__(tensors)
        n, k = tensors.shapes["weight"]
        self.shape = n, k
        self.format = grouped_format(tensors.module, "int8" if rounds_x else "int8_exact", k, group_size)
        if "weight_zero_point" in tensors:
            raise CheckpointError(f"{tensors.module} has 8 bits with zero points, which are not supported")

    def rows(self, begin: int, end: int) -> Quantized:
        return self._quantized(self.tensors["weight"][begin:end], _scale_rows(self.tensors, self.shape[0], begin, end))


def _scale_rows(tensors: Tensors, n: int, begin: int, end: int) -> Tensor:
    """Return weight_scale [n, groups] or [n], or a single one, as [rows, groups]."""
    scales = tensors["weight_scale"]
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(end - begin, 1)
    if scales.shape[0] != n or scales.ndim > 2:
        raise CheckpointError(f"{tensors.module}.weight_scale is {list(scales.shape)}, expected a row for each of {n}")
    return scales.reshape(n, -1)[begin:end]


class PackedInts(StoredLinear):
    """compressed-tensors, pack-quantized: int32 [n, k bits / 32] of 4 or 8 bits, a row's quants in order.

    Quants have half their range added, as have zeros, eight rows of which share an int32 [n / 8, groups]. Groups may be
    of any columns: weight_g_idx [k] has the group of each.
    """

    def __init__(self, tensors: Tensors, bits: int, is_symmetric: bool, rounds_x: bool, group_size: int) -> None:
        super().__init__(tensors)
        n, k = (int(size) for size in tensors["weight_shape"].tolist())
        self.shape, self.bits, self._group_size = (n, k), bits, group_size
        tensors.expect("weight_packed", (n, -(-k * bits // 32)))
        self.has_zeros = not is_symmetric
        if bits == 8 and self.has_zeros:
            raise CheckpointError(f"{tensors.module} has 8 bits with zero points, which are not supported")
        name = "uint4_zero" if self.has_zeros else "int4" if bits == 4 else "int8" if rounds_x else "int8_exact"
        self.format = grouped_format(tensors.module, name, k, group_size)
        if "weight_g_idx" in tensors and name == "int8_exact":
            raise CheckpointError(f"{tensors.module} has 8 bits in groups of columns in another order: not supported")

    @cached_property
    def _columns(self) -> Tensor | None:
        return column_order(self.tensors, "weight_g_idx", self._group_size) if "weight_g_idx" in self.tensors else None

    def rows(self, begin: int, end: int) -> Quantized:
        values = unpacked_ints(self.tensors["weight_packed"][begin:end], self.bits)[:, : self.shape[1]]
        scales = _scale_rows(self.tensors, self.shape[0], begin, end)
        zeros = None
        if self.has_zeros:
            first, last = begin // 8, -(-end // 8)
            packed = self.tensors["weight_zero_point"][first:last]
            zeros = unpacked_ints(packed.t().contiguous(), 4).t()[begin - 8 * first : end - 8 * first]
        else:
            values = values.to(torch.int8) - 8 if self.bits == 4 else (values ^ 0x80).view(torch.int8)
        return self._quantized(_in_order(values, self._columns), scales, zeros, self._columns)


class Mxfp4(StoredLinear):
    """compressed-tensors, mxfp4-pack-quantized: e2m1 codes and a power of two per group of 32.

    Codes are uint8 [n, k / 2], the lower nibble first; exponents, 127 added, are uint8 [n, k / 32].
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        n, half = tensors.shapes["weight_packed"]
        self.shape = n, 2 * half
        self.format = "mxfp4", 32
        tensors.expect("weight_scale", (n, -(-self.shape[1] // 32)))
        for end in ("weight_packed", "weight_scale"):
            if (dtype := tensors[end].dtype) != torch.uint8:
                raise CheckpointError(f"{tensors.module}.{end} is {dtype}, expected uint8".replace("torch.", ""))

    def rows(self, begin: int, end: int) -> Quantized:
        packed, exponents = self.tensors["weight_packed"][begin:end], self.tensors["weight_scale"][begin:end]
        if bool((exponents == 255).any()):
            raise CheckpointError(f"{self.tensors.module}.weight_scale has an exponent of 255, which is NaN")
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        # Our quants are twice e2m1.
        return self._quantized(codes, torch.exp2(exponents.float() - 128))


class Fp8(StoredLinear):
    """e4m3 [n, k] with a scale for the tensor, for each row or for each block of rows and columns."""

    def __init__(self, tensors: Tensors, block: tuple[int, int] | None) -> None:
        super().__init__(tensors)
        n, k = tensors.shapes["weight"]
        self.shape, self._block = (n, k), block
        self._scales = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        self.format = ("fp8", 0) if block is None else grouped_format(tensors.module, "fp8", k, block[1])
        if block is not None:
            tensors.expect(self._scales, (-(-n // block[0]), -(-k // block[1])))

    def rows(self, begin: int, end: int) -> Quantized:
        values = self.tensors["weight"][begin:end].view(torch.uint8)
        if bool((values & 0x7F == 0x7F).any()):
            raise CheckpointError(f"{self.tensors.module}.weight has NaN: its file is damaged; download it again")
        if self._block is None:
            return self._quantized(values, _scale_rows(self.tensors, self.shape[0], begin, end))
        blocks = torch.arange(begin, end) // self._block[0]
        return self._quantized(values, self.tensors[self._scales].float()[blocks])


class Gptq(StoredLinear):
    """GPTQ: int32 [k / 8, n], eight depths in each; scales [groups, n], zeros [groups, n / 8], g_idx [k].

    Its first version stores each zero less one; g_idx has the group of each column, in any order with desc_act.
    """

    def __init__(self, tensors: Tensors, bits: int, is_symmetric: bool, group_size: int, zero_offset: int) -> None:
        super().__init__(tensors)
        per_int = 32 // bits
        packed_k, n = tensors.shapes["qweight"]
        k = packed_k * per_int
        self.shape, self.bits, self._zero_offset = (n, k), bits, zero_offset
        self.is_symmetric, self._group_size = is_symmetric, group_size
        if bits == 8 and not is_symmetric:
            raise CheckpointError(f"{tensors.module} has 8 bits with zero points, which are not supported")
        name = "int8" if bits == 8 else "int4" if is_symmetric else "uint4_zero"
        self.format = grouped_format(tensors.module, name, k, group_size)
        groups = 1 if group_size == -1 else -(-k // group_size)
        tensors.expect("scales", (groups, n))
        tensors.expect("qzeros", (groups, n // per_int))

    @cached_property
    def _columns(self) -> Tensor | None:
        return column_order(self.tensors, "g_idx", self._group_size) if "g_idx" in self.tensors else None

    def rows(self, begin: int, end: int) -> Quantized:
        packed = self.tensors["qweight"][:, begin:end].t().contiguous()
        values = unpacked_ints(packed, self.bits)
        scales = self.tensors["scales"][:, begin:end].t()
        per_int = 32 // self.bits
        first, last = begin // per_int, -(-end // per_int)
        zeros = unpacked_ints(self.tensors["qzeros"][:, first:last].contiguous(), self.bits).int() + self._zero_offset
        zeros = zeros.t()[begin - per_int * first : end - per_int * first]
        if self.is_symmetric:
            middle = 1 << (self.bits - 1)
            if bool((zeros != middle).any()):
                raise CheckpointError(
                    f"{self.tensors.module} has zeros other than {middle}, though its config says sym: correct it"
                )
            values = (values.int() - middle).to(torch.int8)
            return self._quantized(_in_order(values, self._columns), scales, None, self._columns)
        return self._quantized(_in_order(values, self._columns), scales, zeros, self._columns)


class Awq(StoredLinear):
    """AWQ in its gemm layout: int32 [k, n / 8], eight outputs in each; zeros [groups, n / 8] likewise."""

    def __init__(self, tensors: Tensors, group_size: int) -> None:
        super().__init__(tensors)
        k, packed_n = tensors.shapes["qweight"]
        self.shape = packed_n * 8, k
        self.format = grouped_format(tensors.module, "uint4_zero", k, group_size)
        groups = 1 if group_size == -1 else -(-k // group_size)
        tensors.expect("scales", (groups, packed_n * 8))
        tensors.expect("qzeros", (groups, packed_n))

    def rows(self, begin: int, end: int) -> Quantized:
        first, last = begin // 8, -(-end // 8)

        def quants(end_of_name: str) -> Tensor:
            packed = self.tensors[end_of_name][:, first:last].contiguous()
            nibbles = unpacked_ints(packed, 4).unflatten(1, (-1, 8))
            places = torch.tensor(_AWQ_ORDER).argsort()
            return nibbles[..., places].flatten(1).t()[begin - 8 * first : end - 8 * first].contiguous()

        return self._quantized(quants("qweight"), self.tensors["scales"][:, begin:end].t(), quants("qzeros"))


def column_order(tensors: Tensors, end: str, group_size: int) -> Tensor | None:
    """Return the columns ordered by group, int32 [k], if g_idx mixes them; None if they are in order.

    CheckpointError if groups have other numbers of columns than their size.
    """
    groups = tensors[end].long()
    in_order = torch.arange(len(groups)) // (group_size if group_size > 0 else len(groups))
    if torch.equal(groups, in_order):
        return None
    if int(groups.min()) < 0 or not torch.equal(groups.sort().values, in_order):
        raise CheckpointError(f"{tensors.module}.{end} has groups of other lengths than {group_size}: not supported")
    return groups.argsort(stable=True).to(torch.int32)


def _in_order(values: Tensor, columns: Tensor | None) -> Tensor:
    return values.contiguous() if columns is None else values[:, columns.long()].contiguous()
