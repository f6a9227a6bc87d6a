"""RMSNorm and LayerNorm over the last axis; kernels in csrc/kernels/norm."""

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
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis of x [..., D].

    With `residual`, that tensor becomes residual + x first and its norm is returned. With `gate`, the result is
    multiplied by silu(gate). `weight_plus_one` scales by 1 + weight; `activation` as of `linear`, of the result.
    x [T, H, K] norms each head: rows may be slices of a packed qkv. `out` may be x.
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
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis of x [..., D]. `out` may be x."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.layer_norm(view(x), view(weight), view_or_none(bias), view(out), eps)
    return out
