"""Mixture of experts: routes tokens to experts, and computes the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.moe import PackedExperts
from tilewright.ops.torch_backend import on_gpu
from tilewright.ops.torch_backend.common import into
from tilewright.ops.torch_backend.linear import epilogue, product
from tilewright.ops.torch_backend.packed import quantized_of, rows_of


def route(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scoring: str = "softmax",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Route by a stable sort, so that the lower id comes first among equals."""
    logits = logits.float()
    scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (ids.to(torch.int32), weights) if out is None else (out[0].copy_(ids), out[1].copy_(weights))


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if gate_up.form.format.is_quantized or down.form.format.is_quantized:
        return into(out, quantized_moe(x, ids, weights, gate_up, down, activation=activation, residual=residual))
    return into(
        out, plain_moe(x, ids, weights, rows_of(gate_up), rows_of(down), activation=activation, residual=residual)
    )


def quantized_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    """Return `moe` for quantised experts: all tokens go through all experts, most with weight 0."""
    y = torch.zeros(x.shape, device=x.device) if residual is None else residual.float()
    for expert in range(gate_up.num_experts):
        is_chosen = ids == expert
        inner, outer = (
            quantized_of(own) if own.form.format.is_quantized else rows_of(own)
            for own in (gate_up.expert(expert), down.expert(expert))
        )
        hidden = epilogue(product(x, inner), True, activation).to(x.dtype)
        share = torch.where(is_chosen, weights, 0.0).sum(-1, keepdim=True)
        y = torch.where(is_chosen.any(-1, keepdim=True), y + share * product(hidden, outer), y)
    return y.to(x.dtype)


def plain_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """Return `moe` for weights [E, 2I, D] and [E, D, I]; act(gate) * up is rounded to x's type, as in the kernels.

    Which experts have tokens is not known without waiting for the device. So a few tokens gather their experts'
    weights, one choice at a time, and many go through all experts, most with weight 0.
    """
    num_tokens, num_choices = ids.shape
    y = torch.zeros(x.shape, device=x.device) if residual is None else residual.float()
    if on_gpu.is_half(x, gate_up, down):
        outputs = on_gpu.experts(x, ids, gate_up, down, lambda product: epilogue(product, True, activation))
        return (y + (weights[..., None] * outputs.float()).sum(1)).to(x.dtype)
    if num_tokens * num_choices < len(gate_up):
        for choice in range(num_choices):
            chosen = ids[:, choice].long()
            product = torch.einsum("td,tnd->tn", x.float(), gate_up[chosen].float())
            inner = epilogue(product, True, activation).to(x.dtype).float()
            y = y + weights[:, choice, None] * torch.einsum("ti,tdi->td", inner, down[chosen].float())
    else:
        for expert in range(len(gate_up)):
            is_chosen = ids == expert
            inner = epilogue(x.float() @ gate_up[expert].float().t(), True, activation).to(x.dtype).float()
            share = torch.where(is_chosen, weights, 0.0).sum(-1, keepdim=True)
            output = share * (inner @ down[expert].float().t())
            y = torch.where(is_chosen.any(-1, keepdim=True), y + output, y)
    return y.to(x.dtype)
