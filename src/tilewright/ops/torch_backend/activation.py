"""Activations, gated activations, sigmoid gates, the residual add and snakes."""

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend.common import into

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    return into(out, ACTIVATIONS[activation](x.float()).to(x.dtype))


def activate_and_mul(x: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return into(out, (ACTIVATIONS[activation](gate) * up).to(x.dtype))


def add(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    return into(out, (x.float() + y.float()).to(x.dtype))


def sigmoid_gate(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    return into(out, (x.float() * gate.float().sigmoid()).to(x.dtype))


def snake(x: Tensor, scale: Tensor, share: Tensor, *, out: Tensor | None = None) -> Tensor:
    wide = x.float()
    return into(out, (wide + torch.sin(wide * scale).square() * share).to(x.dtype))
