"""The sparse feed-forward layer: each token goes through the few experts with the highest router scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers.cost import Cost, expert_cost, linear_cost
from tilewright.layers.linear import Experts, Linear
from tilewright.layers.mlp import GatedMlp
from tilewright.ops.moe import route
from tilewright.weights.experts import ExpertFormat


@dataclass(frozen=True)
class MoeConfig:
    num_experts: int
    experts_per_token: int
    expert_width: int
    renormalize: bool  # the weights of a token's experts sum to one
    activation: str
    stored: ExpertFormat  # how the checkpoint keeps the experts
    shared_width: int = 0  # of an expert that all tokens go through, times the sigmoid of a gate; 0: there is none


class SparseMlp:
    """x + the weighted sum of the token's experts, and of the shared one where there is one, updating x."""

    def __init__(self, name: str, width: int, config: MoeConfig) -> None:
        self.config = config
        routes = [(f"{name}.gate", config.num_experts)]
        self.shared: GatedMlp | None = None
        if config.shared_width:  # its gate is one more row of the router
            routes.append((f"{name}.shared_expert_gate", 1))
            self.shared = GatedMlp(
                f"{name}.shared_expert", width, config.shared_width, activation=config.activation, bias=False
            )
        self.router = Linear(routes, width, num_exact=len(routes))
        self.experts = Experts(f"{name}.experts", config.num_experts, width, config.expert_width, config.stored)

    def __call__(self, x_TD: Tensor, h_TD: Tensor) -> None:
        config = self.config
        scores = self.router(h_TD, out_dtype=torch.float32)
        if self.shared is not None:
            scores, shared_gate = scores[:, : config.num_experts], scores[:, config.num_experts :]
            self.shared(x_TD, h_TD, gate=shared_gate)
        ids, weights = route(scores, config.experts_per_token, renormalize=config.renormalize)
        self.experts(h_TD, ids, weights, activation=config.activation, residual=x_TD, out=x_TD)

    def cost(self) -> Cost:
        experts = (
            expert_cost(weights, self.config.experts_per_token) for weights in (self.experts.gate_up, self.experts.down)
        )
        return sum(experts, linear_cost(self))
