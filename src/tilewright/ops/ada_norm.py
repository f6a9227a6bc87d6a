"""Norms with a computed scale and shift, and the gated residual add, of diffusion transformers; kernels in
csrc/kernels/ada_norm.

A scale, shift or gate of x [B, L, C] is [B, C] (or [B, 1, C]) for one per sample, [B, L, C] for one per token, or
[B, F, 1, C] for one per frame of L / F tokens. It may be fp32 beside bf16 x, and a slice of a packed tensor of them.
"""

from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty


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
    """layer_norm(x) * (constant + scale) + shift of x [B, L, C], the norm with `weight` and `bias` [C] if given.

    With `residual`, that tensor becomes residual + gate * x first (residual + x without `gate`), and its norm is taken.
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
    """rms_norm(x) * (constant + scale) + shift of x [B, L, C]; all else as of `ada_layer_norm`."""
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
    """residual + gate * x of residual and x [B, L, C]. `out` may be either."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.gated_add(view(residual), view(x), view(gate), view(out))
    return out
