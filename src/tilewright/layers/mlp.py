"""The gated feed-forward layer, down(act(gate(h)) * up(h)), and the sparse one, where a router chooses experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition, precision
from tilewright.layers.cost import Cost, expert_cost, linear_cost
from tilewright.layers.linear import Experts, Linear
from tilewright.ops.activation import sigmoid_gate
from tilewright.ops.moe import route
from tilewright.types import UnsupportedConfig
from tilewright.weights.linear import ExpertStorage

# Narrower models keep their down projections more precise: with 576 and 896 columns these made a third to two thirds of
# the divergence.
MIN_ROBUST_WIDTH = 1024
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf", "quick_gelu": "gelu_quick"}


def activation_named(name: str) -> str:
    """Return the op's name for an activation named as in checkpoints."""
    if name not in _ACTIVATIONS:
        raise UnsupportedConfig(f"hidden_act is {name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


@dataclass(frozen=True)
class MlpConfig:
    width: int  # between gate and down
    activation: str
    bias: bool = False


class GatedMlp:
    """x + down(act(gate(h)) * up(h)), updating x.

    `tanh_scale` names a scalar whose tanh multiplies the addend, `row_scale` a vector [width] that multiplies it.
    """

    def __init__(
        self,
        name: str,
        width: int,
        inner_width: int,
        *,
        activation: str,
        bias: bool,
        tanh_scale: str | None = None,
        row_scale: str | None = None,
    ) -> None:
        self.activation = activation
        shard = partition.current().width("MLP width", inner_width)
        parts = [(f"{name}.gate_proj", inner_width, shard), (f"{name}.up_proj", inner_width, shard)]
        self.gate_up = Linear(parts, width, bias=bias, gated=True)
        formats = precision.current()
        with precision.use(formats.for_sensitive if width < MIN_ROBUST_WIDTH else formats):
            self.down = Linear(
                [(f"{name}.down_proj", width)],
                inner_width,
                column_shard=shard,
                bias=bias,
                tanh_scale=tanh_scale,
                row_scale=row_scale,
            )

    def __call__(self, x_TD: Tensor, h_TD: Tensor, *, gate: Tensor | None = None) -> None:
        """Update x. The sigmoid of `gate` [T, 1] multiplies the inputs of the last product, fewer than its outputs."""
        inner = self.gate_up(h_TD, activation=self.activation)
        if gate is not None:
            sigmoid_gate(inner, gate, out=inner)
        self.down(inner, residual=x_TD, out=x_TD)

    def cost(self) -> Cost:
        return linear_cost(self)


@dataclass(frozen=True)
class MoeConfig:
    num_experts: int
    experts_per_token: int
    expert_width: int
    renormalize: bool  # the weights of a token's experts are normalised to sum to one
    activation: str
    stored: ExpertStorage  # how the checkpoint stores the experts
    shared_width: int = 0  # of an expert for all tokens, times the sigmoid of a gate; 0: none


class SparseMlp:
    """x + the weighted sum of the token's experts, and of the shared one if there is one, updating x."""

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
