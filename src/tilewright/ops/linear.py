"""y = epilogue(x W^T + b) with the weight packed once; kernels in csrc/kernels/linear, layout in csrc/base/tile.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.packed import Packed, PackedForm, WeightFormat, pack_into, unpacked, weight_format
from tilewright.ops.plan import empty
from tilewright.ops.quantized import Quantized, concatenate

# Block of rows packed at a time from a file: small beside a model, large enough for all threads.
PACK_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class PackedWeight(Packed):
    """A weight [n, k] and its bias, packed for the backend that was active."""

    bias: Tensor | None = None  # fp32; in tiles, in packed order and padded to whole strips
    columns: Tensor | None = None  # int32 [k]: column of x for each weight column, if they are not in order
    next: PackedWeight | None = None  # the outputs after these, in another format and a separate product

    @property
    def out_features(self) -> int:
        """Number of outputs, without those of `next`."""
        return self.n // 2 if self.gated else self.n

    def unpack(self) -> Tensor:
        """Return the original weight [n, k]."""
        found = unpacked(self)
        return found if self.columns is None else torch.empty_like(found).index_copy_(1, self.columns.long(), found)


def pack_weight(
    weight: Tensor | Quantized,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype | WeightFormat | None = None,
) -> PackedWeight:
    """Pack `weight` [N, K] for `linear`. `gated`: its rows are gate then up, equally many.

    `dtype`: a type, or a format (`ops.packed.weight_format`) to quantise to; None: that of the weight.
    """
    if len(weight.shape) != 2:
        raise ValueError(f"pack_weight: weight has shape {list(weight.shape)}, expected [N, K]")
    n, k = weight.shape
    if dtype is None:
        dtype = weight.dtype if isinstance(weight, Tensor) else weight_format(weight.name, weight.group_size)
    packed = empty_weight(n, k, bias, gated, dtype)
    pack_into(weight, packed)
    return with_columns(packed, weight)


def with_columns(packed: PackedWeight, weight: Tensor | Quantized) -> PackedWeight:
    """Return the packed weight with the column order of the weight it was packed from; ValueError if it has another."""
    columns = weight.columns if isinstance(weight, Quantized) else None
    if columns is None and packed.columns is None:
        return packed
    if columns is None or (packed.columns is not None and not torch.equal(columns, packed.columns)):
        raise ValueError("rows of one product have their columns in different orders")
    return replace(packed, columns=columns.to(torch.int32).contiguous())


@op
def pack_weight_rows(
    read_rows: Callable[[int, int], Tensor | Quantized],
    n: int,
    k: int,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype | WeightFormat,
    row_dtype: torch.dtype = torch.float32,
) -> PackedWeight:
    """Pack a weight [n, k], read by `read_rows(begin, end)` one block at a time, like `pack_weight`.

    Strips are stored consecutively, so a block of whole strips is packed as its own weight. `row_dtype`: type of
    unpacked rows of a quantised weight that is also a table.
    """
    packed = empty_weight(n, k, bias, gated, dtype, row_dtype)
    num_parts, tile_rows = (2, 16) if gated else (1, 32)
    part_rows = n // num_parts
    block_rows = max(PACK_BLOCK_BYTES // (k * 4 * num_parts) // tile_rows, 1) * tile_rows
    done = done_scales = 0
    for begin in range(0, part_rows, block_rows):
        end = min(begin + block_rows, part_rows)
        parts = [read_rows(part * part_rows + begin, part * part_rows + end) for part in range(num_parts)]
        rows = stacked(parts)
        form = replace(packed.form, n=rows.shape[0])
        elements, scales = form.num_elements, form.num_scales
        own_scales = packed.scales[done_scales : done_scales + scales] if packed.scales is not None else None
        pack_into(rows, PackedWeight(packed.data[done : done + elements], form, own_scales))
        packed = with_columns(packed, rows)
        done, done_scales = done + elements, done_scales + scales
    return packed


def stacked(parts: Sequence[Tensor | Quantized]) -> Tensor | Quantized:
    """Concatenate rows, which are all tensors or all of one quantised format."""
    if len(parts) == 1:
        return parts[0]
    quants = [part for part in parts if isinstance(part, Quantized)]
    return concatenate(quants) if quants else torch.cat([part for part in parts if isinstance(part, Tensor)])


def empty_weight(
    n: int,
    k: int,
    bias: Tensor | None,
    gated: bool,
    dtype: torch.dtype | WeightFormat,
    row_dtype: torch.dtype = torch.float32,
) -> PackedWeight:
    """Allocate a weight [n, k], to be filled by `pack_into`, with its bias already in place."""
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"pack_weight: bias has shape {list(bias.shape)}, expected [N={n}]")
    form = PackedForm(dtype if isinstance(dtype, WeightFormat) else weight_format(dtype), n, k, gated)
    data, scales = form.allocate()
    return PackedWeight(data, form, scales, row_dtype, None if bias is None else pack_bias(bias, gated))


@op
def pack_bias(bias: Tensor, gated: bool) -> Tensor:
    """Return `bias` [N] in the layout of `linear`, in fp32."""
    n = len(bias)
    if not gated:
        return torch.nn.functional.pad(bias.float(), (0, -n % 32))
    halves = torch.nn.functional.pad(bias.float().view(2, n // 2), (0, -(n // 2) % 16))
    return halves.view(2, -1, 16).transpose(0, 1).reshape(-1).contiguous()


@op
def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return activation(x W^T + b) + residual for x [..., K], or activation(gate) * up + residual if gated.

    `activation`: none, silu, gelu_tanh, gelu_erf, gelu_quick. `residual` has the shape and type of the result and may
    be `out`. Sums are fp32; bf16 x with bf16 weights multiplies in bf16, fp32 x in fp32. For quantised weights x is
    rounded to bytes, row by row and group by group (`ops.quantized.quantize_rows`), except with formats in
    `ops.quantized.WIDENED`.
    """
    if out is None:
        out = empty((*x.shape[:-1], weight.out_features), out_dtype or x.dtype)
    kernels.linear(
        view(x),
        weight.native(),
        view_or_none(weight.bias),
        view_or_none(residual),
        view(out),
        activation,
        view_or_none(weight.columns),
    )
    return out
