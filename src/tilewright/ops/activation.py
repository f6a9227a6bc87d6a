"""Activations, gated activations, sigmoid gates, the residual add and snakes; kernels in csrc/kernels/activation."""

from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view
from tilewright.ops.plan import empty


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x * sigmoid(x). `out` may be x."""
    return activate(x, "silu", out=out)


@op
def activate(x: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """Return the named activation of each element: none, silu, gelu_tanh, gelu_erf or gelu_quick. `out` may be x."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.activate(view(x), view(out), activation)
    return out


@op
def activate_and_mul(x: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """activation(gate) * up [..., I] of x [..., 2I], gate first."""
    if out is None:
        out = empty((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    kernels.activate_and_mul(view(x), view(out), activation)
    return out


@op
def add(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x + y, of one shape. `out` may be either."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.add(view(x), view(y), view(out))
    return out


@op
def sigmoid_gate(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate), for a gate of the shape of x, or [..., 1] for one per row.

    x [T, H, K] and gate may be heads of packed rows; gate may be fp32 beside bf16 x. `out` may be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.sigmoid_gate(view(x), view(gate), view(out))
    return out


@op
def snake(x: Tensor, scale: Tensor, share: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x + sin(scale x)^2 * share, for scale and share fp32 [C] of the channels of x [..., C]. `out` may be x."""
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.snake(view(x), view(scale), view(share), view(out))
    return out
