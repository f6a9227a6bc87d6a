"""Norms with a computed scale and shift, and the gated residual add."""

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend.common import into


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
    """What is normed: the sum with `residual` as it is stored, rounded."""
    if residual is None:
        return x
    return residual.copy_(residual.float() + (x.float() if gate is None else _per_token(gate, x.shape[1]) * x.float()))


def _modulated(normed: Tensor, scale: Tensor | None, shift: Tensor | None, constant: float) -> Tensor:
    length = normed.shape[1]
    y = normed * (constant if scale is None else constant + _per_token(scale, length))
    return y if shift is None else y + _per_token(shift, length)


def _per_token(modulation: Tensor, length: int) -> Tensor:
    """fp32 [B, 1 or L, C] of one per sample, token or frame."""
    if modulation.dim() == 2:
        return modulation.float()[:, None]
    if modulation.dim() == 3:
        return modulation.float()
    num_frames = modulation.shape[1]
    return modulation.float().expand(-1, -1, length // num_frames, -1).flatten(1, 2)
