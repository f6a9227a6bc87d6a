"""y = epilogue(x W^T + b) with the weight packed once; kernels in csrc/kernels/linear, layout in csrc/base/tile.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.ops.memory import empty_in_huge_pages
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.packed import Packed, PackedForm, weight_format
from tilewright.ops.plan import empty

# Rows are packed this much at a time when they come from a file: small beside a model, large enough for all threads.
PACK_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class PackedWeight(Packed):
    """A weight [n, k] in tiles, and its bias."""

    bias: Tensor | None = None  # fp32, in packed order, padded to whole strips

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.gated else self.n

    def unpack(self) -> Tensor:
        """The weight [n, k] as it came."""
        weight = torch.empty(self.n, self.k, dtype=self.dtype)
        kernels.unpack_weight(self.native(), view(weight))
        return weight


def pack_weight(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, dtype: torch.dtype | None = None
) -> PackedWeight:
    """`weight` [N, K] in tiles. `gated`: its rows are gate then up, as many of each."""
    if weight.dim() != 2:
        raise ValueError(f"pack_weight: weight has shape {list(weight.shape)}, expected [N, K]")
    n, k = weight.shape
    packed = _empty(n, k, bias, gated, dtype or weight.dtype)
    kernels.pack_weight(view(weight), packed.native())
    return packed


def pack_weight_rows(
    read_rows: Callable[[int, int], Tensor],
    n: int,
    k: int,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype,
) -> PackedWeight:
    """As `pack_weight`, for a weight [n, k] that `read_rows(begin, end)` gives a block at a time.

    Strips lie one after another, so a block of whole strips is packed as a weight of its own.
    """
    packed = _empty(n, k, bias, gated, dtype)
    num_parts, tile_rows = (2, 16) if gated else (1, 32)
    part_rows = n // num_parts
    block_rows = max(PACK_BLOCK_BYTES // (k * 4 * num_parts) // tile_rows, 1) * tile_rows
    done = 0
    for begin in range(0, part_rows, block_rows):
        end = min(begin + block_rows, part_rows)
        parts = [read_rows(part * part_rows + begin, part * part_rows + end) for part in range(num_parts)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        form = replace(packed.form, n=len(rows))
        kernels.pack_weight(view(rows), PackedWeight(packed.data[done : done + form.num_elements], form).native())
        done += form.num_elements
    return packed


def _empty(n: int, k: int, bias: Tensor | None, gated: bool, dtype: torch.dtype) -> PackedWeight:
    form = PackedForm(weight_format(dtype), n, k, gated)
    data = empty_in_huge_pages(form.num_elements, dtype)
    return PackedWeight(data, form, bias=None if bias is None else _pack_bias(bias, n, gated))


def _pack_bias(bias: Tensor, n: int, gated: bool) -> Tensor:
    if bias.shape != (n,):
        raise ValueError(f"pack_weight: bias has shape {list(bias.shape)}, expected [N={n}]")
    if not gated:
        return torch.nn.functional.pad(bias.float(), (0, -n % 32))
    halves = torch.nn.functional.pad(bias.float().view(2, n // 2), (0, -(n // 2) % 16))
    return halves.view(2, -1, 16).transpose(0, 1).reshape(-1).contiguous()


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(x W^T + b) + residual for x [..., K]; for a gated weight activation(gate) * up + residual.

    `activation`: none, silu, gelu_tanh, gelu_erf, gelu_quick. `residual` has the shape and type of the result and may
    be `out`. Sums are fp32; bf16 x with bf16 weights multiplies in bf16, fp32 x in fp32.
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
    )
    return out
