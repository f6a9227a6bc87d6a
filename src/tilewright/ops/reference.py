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


# ---- attention


def _visible(num_queries: int, num_keys: int, causal: bool, window: int) -> Tensor:
    """[Sq, Sk] bool: the last query stands at the last key."""
    distance = (torch.arange(num_queries)[:, None] + num_keys - num_queries) - torch.arange(num_keys)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window > 0:
        visible &= distance.abs() < window
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """One sequence: q [Sq, H, K], k and v [Sk, G, K], mask [H or 1, Sq or 1, Sk]."""
    num_queries, num_heads, width = q.shape
    num_keys, group = k.shape[0], num_heads // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * (width**-0.5 if scale is None else scale)
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    hidden = ~_visible(num_queries, num_keys, causal, window)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.float()
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a query that sees nothing gives zeros
    return (weights @ v).transpose(0, 1).to(q.dtype)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    query_bounds = query_starts.tolist()
    key_bounds = query_bounds if key_starts is None else key_starts.tolist()
    out = torch.empty(q.shape, dtype=q.dtype)
    for b in range(len(query_bounds) - 1):
        queries, keys = slice(*query_bounds[b : b + 2]), slice(*key_bounds[b : b + 2])
        part = None
        if mask is not None:
            part = mask[b if mask.shape[0] > 1 else 0]
            part = part[:, : queries.stop - queries.start, : keys.stop - keys.start]
        out[queries] = attention(q[queries], k[keys], v[keys], mask=part, **options)  # type: ignore[arg-type]
    return out


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_size: int,
    block_table: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    **options: object,
) -> Tensor:
    """keys and values as KvCache.read gives them: [pages * page_size, G, K]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    bounds = query_starts.tolist()
    for b, length in enumerate(kv_lengths.tolist()):
        token = torch.arange(length)
        slots = block_table[b].long()[token // page_size] * page_size + token % page_size
        queries = slice(*bounds[b : b + 2])
        out[queries] = attention(q[queries], keys[slots], values[slots], **options)  # type: ignore[arg-type]
    return out


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
