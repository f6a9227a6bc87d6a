"""RMSNorm, LayerNorm, GroupNorm, norms with a computed scale and shift, and the gated residual add."""

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
    """Norm the sum with `residual` after rounding it: the next layer reads the rounded one."""
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
    x = _added(x, residual, gate)
    wide_weight, wide_bias = (None if t is None else t.float() for t in (weight, bias))
    normed = functional.layer_norm(x.float(), x.shape[-1:], wide_weight, wide_bias, eps)
    return into(out, _modulated(normed, scale, shift, constant).to(x.dtype))


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
    x = _added(x, residual, gate)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    return into(out, _modulated(normed, scale, shift, constant).to(x.dtype))


def gated_add(residual: Tensor, x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    return into(out, (residual.float() + _per_token(gate, x.shape[1]) * x.float()).to(x.dtype))


def _added(x: Tensor, residual: Tensor | None, gate: Tensor | None) -> Tensor:
    """Return the input of a norm: the sum with `residual`, rounded as stored."""
    if residual is None:
        return x
    return residual.copy_(residual.float() + (x.float() if gate is None else _per_token(gate, x.shape[1]) * x.float()))


def _modulated(normed: Tensor, scale: Tensor | None, shift: Tensor | None, constant: float) -> Tensor:
    length = normed.shape[1]
    y = normed * (constant if scale is None else constant + _per_token(scale, length))
    return y if shift is None else y + _per_token(shift, length)


def _per_token(modulation: Tensor, length: int) -> Tensor:
    """Expand a modulation per sample, token or frame to fp32 [B, 1 or L, C]."""
    if modulation.dim() == 2:
        return modulation.float()[:, None]
    if modulation.dim() == 3:
        return modulation.float()
    num_frames = modulation.shape[1]
    return modulation.float().expand(-1, -1, length // num_frames, -1).flatten(1, 2)


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
    wide_weight, wide_bias = (None if t is None else t.float() for t in (weight, bias))
    y = functional.group_norm(x.float().movedim(-1, 1), num_groups, wide_weight, wide_bias, eps).movedim(1, -1)
    return into(out, ACTIVATIONS[activation](y).to(x.dtype))


def group_statistics(x: Tensor, num_groups: int) -> Tensor:
    groups = x.float().unflatten(-1, (num_groups, -1)).movedim(-2, 1).flatten(2)
    variance, mean = torch.var_mean(groups, dim=2, correction=0)
    return torch.stack((mean, variance), dim=2)
