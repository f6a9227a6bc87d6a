"""Muon for the matrices inside the network, AdamW for the rest.

Muon makes every direction of a matrix's update equally long. Matrices of one shape are stacked, so that a step is a
few batched products.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MATCH_ADAM = 0.2  # the root mean square of AdamW's updates: both then take the same learning rate
NOT_INSIDE = ("embed", "head")  # of names: what turns tokens into vectors, and back
# Coefficients of the quintic that drives singular values towards one, and how often it is applied.
QUINTIC, NUM_ITERATIONS = (3.4445, -4.7750, 2.0315), 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of (count, rows, columns) with its singular values near one."""
    a, b, c = QUINTIC
    x = matrices.bfloat16() if matrices.is_cuda else matrices  # CPUs may have no products in bf16 that are any faster
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
                state = self.state[parameters[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(gradients)
                state["momentum"].lerp_(gradients, 1 - group["momentum"])
                ahead = gradients.lerp(state["momentum"], group["momentum"])
                update = orthogonalised(ahead).float() * (MATCH_ADAM * max(shape) ** 0.5)
                weights: list[Tensor] = [*parameters]
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(update.unbind()), alpha=-group["lr"])


def make_optimisers(
    network: nn.Module, kind: str, lr: float, weight_decay: float, fused: bool
) -> list[torch.optim.Optimizer]:
    matrices, decayed, others = [], [], []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        if kind == "muon" and parameter.ndim == 2 and not any(part in name for part in NOT_INSIDE):
            matrices.append(parameter)
        elif parameter.ndim > 1:
            decayed.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    muon = [Muon(matrices, lr=lr, momentum=0.95, weight_decay=weight_decay)] if matrices else []
    return [*muon, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=fused)]
