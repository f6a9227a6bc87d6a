"""Mixture of experts in plain torch, as ops.reference has the other ops."""

import torch
from torch import Tensor

from tilewright.ops.reference import linear


def route(logits: Tensor, top_k: int, *, renormalize: bool, scoring: str = "softmax") -> tuple[Tensor, Tensor]:
    """A stable sort, so that the lower id comes first among equals."""
    logits = logits.float()
    scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), weights


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """gate_up [E, 2I, D], down [E, D, I]; act(gate) * up is rounded to the type of x, as the kernels do."""
    y = torch.zeros(x.shape) if residual is None else residual.float()
    for expert in ids.unique().tolist():
        tokens, choice = torch.where(ids == expert)
        inner = linear(x[tokens], gate_up[expert], gated=True, activation=activation)
        output = linear(inner, down[expert], out_dtype=torch.float32)
        y = y.index_add(0, tokens, output * weights[tokens, choice, None])
    return y.to(x.dtype)
