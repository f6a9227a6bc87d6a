"""RMSNorm, LayerNorm, GroupNorm, adaptive norms; kernels in csrc/kernels/{norm,group_norm,ada_norm}.

A scale, shift or gate of x [B, L, C] is [B, C] (or [B, 1, C]) for one per sample, [B, L, C] for one per token, or [B,
F, 1, C] for one per frame of L / F tokens. It may be fp32 beside bf16 x, and a slice of a packed tensor of them.
"""

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty


@op
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    weight_plus_one: bool = False,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last axis of x [..., D].

    With `residual`, that tensor becomes residual + x first and its norm is returned. With `gate`, the result is
    multiplied by silu(gate). `weight_plus_one` scales by 1 + weight; `activation` as for `linear`, applied to the
    result. x [T, H, K] norms each head: rows may be slices of a packed qkv. `out` may be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.rms_norm(
        view(x),
        view(weight),
        view_or_none(residual),
        view_or_none(gate),
        view(out),
        eps,
        weight_plus_one,
        activation,
    )
    return out


@op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, over the last axis of x [..., D]. `out` may be x."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.layer_norm(view(x), view(weight), view_or_none(bias), view(out), eps)
    return out


@op
def ada_layer_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    constant: float = 1.0,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x) * (constant + scale) + shift of x [B, L, C], the norm with `weight` and `bias` [C] if given.

    With `residual`, that tensor becomes residual + gate * x first (residual + x without `gate`), and its norm is used.
    `out` may be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    _ada_norm(x, scale, shift, weight, bias, residual, gate, out, eps, constant, is_rms=False)
    return out


@op
def ada_rms_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    *,
    weight: Tensor | None = None,
    constant: float = 1.0,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return rms_norm(x) * (constant + scale) + shift of x [B, L, C]; all else is as in `ada_layer_norm`."""
    if out is None:
        out = empty(x.shape, x.dtype)
    _ada_norm(x, scale, shift, weight, None, residual, gate, out, eps, constant, is_rms=True)
    return out


def _ada_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    eps: float,
    constant: float,
    *,
    is_rms: bool,
) -> None:
    kernels.ada_norm(
        view(x),
        view_or_none(scale),
        view_or_none(shift),
        view_or_none(weight),
        view_or_none(bias),
        view_or_none(residual),
        view_or_none(gate),
        view(out),
        eps,
        constant,
        is_rms,
    )


@op
def gated_add(residual: Tensor, x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return residual + gate * x for residual and x [B, L, C]. `out` may be either."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.gated_add(view(residual), view(x), view(gate), view(out))
    return out


@op
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """Return activation((x - mean) / sqrt(var + eps) * weight + bias) of x [B, ..., C], with any axes between.

    Mean and variance are those of an item's groups of C / num_groups neighbouring channels, over all axes between.
    `activation` as for `linear`: silu in autoencoders. `out` may be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.group_norm(view(x), view_or_none(weight), view_or_none(bias), view(out), num_groups, eps, activation)
    return out


@op
def group_statistics(x: Tensor, num_groups: int) -> Tensor:
    """Return mean and variance, fp32 [B, num_groups, 2], of an item's groups of channels, as in `group_norm`."""
    out = torch.empty(x.shape[0], num_groups, 2)
    kernels.group_statistics(view(x), view(out), num_groups)
    return out


def group_norm_table(statistics: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return each channel's mean, factor and bias, fp32 [B, 3, C], the norm of `conv3d`; statistics [B, G, 2]."""
    width = len(weight) // statistics.shape[1]
    mean, variance = (part.repeat_interleave(width, dim=1) for part in statistics.unbind(2))
    factor = (variance.double() + eps).rsqrt() * weight.double()
    return torch.stack((mean, factor.float(), bias.float().expand_as(mean)), dim=1)
