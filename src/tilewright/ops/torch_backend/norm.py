"""RMSNorm and LayerNorm over the last axis."""

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend import gpu_kernels, on_gpu
from tilewright.ops.torch_backend.activation import ACTIVATIONS
from tilewright.ops.torch_backend.common import into


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
    """The sum with `residual` is rounded before it is normed: the norm is that of what the next layer reads."""
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    if on_gpu.is_half(x, weight) and gate is None and activation == "none":
        y = gpu_kernels.rms_norm(x, weight, eps, weight_plus_one, out)
        if y is not None:
            return y
        if not weight_plus_one:
            return into(out, functional.rms_norm(x, x.shape[-1:], weight, eps))  # one kernel, fp32 within
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * scale * (weight.float() + (1.0 if weight_plus_one else 0.0))
    if gate is not None:
        y = y * functional.silu(gate.float())
    return into(out, ACTIVATIONS[activation](y).to(x.dtype))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    if on_gpu.is_half(x, weight) and (bias is None or bias.dtype == x.dtype):
        return into(out, functional.layer_norm(x, x.shape[-1:], weight, bias, eps))
    wide_bias = None if bias is None else bias.float()
    return into(out, functional.layer_norm(x.float(), x.shape[-1:], weight.float(), wide_bias, eps).to(x.dtype))
