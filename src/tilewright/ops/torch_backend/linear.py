"""y = epilogue(x W^T + b), with the rows of the weight in their original order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops import backend
from tilewright.ops.linear import PACK_BLOCK_BYTES, PackedWeight, empty_weight, with_columns
from tilewright.ops.packed import WeightFormat, pack_into
from tilewright.ops.quantized import ROTATED, WIDENED, Quantized, in_groups, mins_of, quantize_rows, quants_of, rotate
from tilewright.ops.torch_backend import gpu_kernels, on_gpu
from tilewright.ops.torch_backend.activation import ACTIVATIONS
from tilewright.ops.torch_backend.common import into
from tilewright.ops.torch_backend.packed import quantized_of, rows_of


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
    packed = empty_weight(n, k, bias, gated, dtype, row_dtype)
    if packed.form.format.is_quantized:
        whole = read_rows(0, n)
        pack_into(whole, packed)
        return with_columns(packed, whole)
    rows = rows_of(packed)
    block_rows = max(PACK_BLOCK_BYTES // (k * 4), 1)
    for begin in range(0, n, block_rows):
        end = min(begin + block_rows, n)
        block = read_rows(begin, end)
        assert isinstance(block, Tensor)
        rows[begin:end] = block
    return packed


def pack_bias(bias: Tensor, gated: bool) -> Tensor:
    return bias.to(backend.device(), torch.float32, copy=True)


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out_dtype = out_dtype if out is None else out.dtype
    stored: Tensor | Quantized
    if weight.form.format.is_quantized:
        stored = replace(quantized_of(weight), columns=weight.columns)
    else:
        stored = rows_of(weight)
        if on_gpu.is_half(x, stored):  # straight into `out`
            own = stored, weight.bias, weight.gated, activation, residual
            return _half_linear(x, *own, out_dtype or x.dtype, out)
    y = plain_linear(
        x,
        stored,
        weight.bias,
        gated=weight.gated,
        activation=activation,
        residual=residual,
        out_dtype=out_dtype,
    )
    return into(out, y)


def plain_linear(
    x: Tensor,
    weight: Tensor | Quantized,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `linear` for a weight [N, K] that is a plain tensor, or quants and scales."""
    if isinstance(weight, Tensor) and on_gpu.is_half(x, weight):
        return _half_linear(x, weight, bias, gated, activation, residual, out_dtype or x.dtype, None)
    y = product(x, weight)
    if bias is not None:
        y = y + bias.float()
    y = epilogue(y, gated, activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)


def _half_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    y = gpu_kernels.few_rows(x, weight, bias, gated, activation, residual, out, out_dtype)
    if y is not None:
        return y
    is_plain = not gated and activation == "none" and out_dtype == x.dtype
    if is_plain and residual is not None and residual is out and residual.is_contiguous():
        rows = residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        if bias is not None:
            rows.add_(bias)
        return residual
    y = epilogue(on_gpu.product(x, weight, out_dtype, bias), gated, activation)
    return into(out, y if residual is None else y + residual)


def product(x: Tensor, weight: Tensor | Quantized) -> Tensor:
    """Return x W^T in fp32. Products with a quantised weight are summed by group, with x rounded to bytes if needed."""
    if isinstance(weight, Tensor):
        return functional.linear(x.float(), weight.float())
    if weight.columns is not None:
        x = x[..., weight.columns.long()]
    if weight.name in ROTATED:
        x = rotate(x)
    if weight.name in WIDENED:
        quants, x_scales = in_groups(x.float(), weight.group_size), None
    else:
        quants, x_scales = quantize_rows(x, weight.scale_group)
    values, mins = in_groups(quants_of(weight), weight.scale_group), mins_of(weight)
    y = torch.zeros(*x.shape[:-1], len(values), device=x.device)
    for group in range(values.shape[1]):
        sums = functional.linear(quants[..., group, :], values[:, group])
        x_scale = 1.0 if x_scales is None else x_scales[..., group, None]
        y = y + sums * x_scale * weight.scales[:, group].float()
        if mins is not None:
            y = y - quants[..., group, :].sum(-1, keepdim=True) * x_scale * mins[:, group]
    return y


def epilogue(product: Tensor, gated: bool, activation: str) -> Tensor:
    """Return activation(product), or activation(gate) * up of its two halves."""
    if not gated:
        return ACTIVATIONS[activation](product)
    gate, up = product.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
