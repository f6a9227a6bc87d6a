"""The same ops in plain torch: the twin every kernel is tested against, and the path for other devices.

Each twin computes in fp32 and rounds once at the end, as the kernels do.
"""

import torch
from torch import Tensor

# ---- norm


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    weight_plus_one: bool = False,
) -> Tensor:
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * scale * (weight.float() + (1.0 if weight_plus_one else 0.0))
    if gate is not None:
        y = y * torch.nn.functional.silu(gate.float())
    return y.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    y = torch.nn.functional.layer_norm(
        x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps
    )
    return y.to(x.dtype)


# ---- linear

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[activation](gate) * up
    else:
        y = ACTIVATIONS[activation](y)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)


# ---- activation


def activate(x: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


def activate_and_mul(x: Tensor, activation: str) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() + y.float()).to(x.dtype)


# ---- rope


def rope_table(
    positions: Tensor, inv_freq: Tensor, axis_of_frequency: Tensor, attention_scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    angle = positions.float()[axis_of_frequency.long()].T * inv_freq
    # The angle is what fp32 makes of it; its cosine is then taken exactly.
    cos, sin = angle.double().cos(), angle.double().sin()
    return (cos * attention_scaling).float(), (sin * attention_scaling).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    rotated = 2 * cos.shape[-1]
    turned, rest = x[..., :rotated].float(), x[..., rotated:]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def norm_rope(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_plus_one: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """One side of qk_norm_rope."""
    normed = rms_norm(x.float(), weight, eps, weight_plus_one=weight_plus_one)
    return rope(normed, cos, sin, interleaved=interleaved).to(x.dtype)


# ---- embedding


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.long()]


def scatter_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = values
    return out


def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = (out[rows].float() + values.float()).to(out.dtype)
    return out
