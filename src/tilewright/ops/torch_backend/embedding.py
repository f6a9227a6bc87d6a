"""Token embeddings, media embeddings into token rows, and rotary position embedding."""

import torch
from torch import Tensor

from tilewright.ops.linear import PackedWeight
from tilewright.ops.torch_backend import gpu_kernels, on_gpu
from tilewright.ops.torch_backend.common import into
from tilewright.ops.torch_backend.norm import rms_norm
from tilewright.ops.torch_backend.packed import rows_of, unpacked


def embedding(
    ids: Tensor,
    table: Tensor | PackedWeight,
    *,
    first: int = 0,
    num_ids: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if isinstance(table, PackedWeight) and table.form.format.is_quantized:
        rows = unpacked(table)
    else:
        rows = rows_of(table) if isinstance(table, PackedWeight) else table
    if num_ids is None:
        return into(out, rows[ids.long()])
    own = ids.long() - first
    is_own = (own >= 0) & (own < len(rows))
    return into(out, torch.where(is_own[:, None], rows[own.clamp(0, len(rows) - 1)], 0))


def scatter_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = values
    return out


def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = (out[rows].float() + values.float()).to(out.dtype)
    return out


def rope_table(
    positions: Tensor,
    inv_freq: Tensor,
    axis_of_frequency: Tensor,
    attention_scaling: float = 1.0,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the angle in fp32, and its cosine and sine in fp64, then round them."""
    angle = (positions.float()[axis_of_frequency.long()].T * inv_freq).double().contiguous()
    cos, sin = ((part * attention_scaling).float() for part in (angle.cos(), angle.sin()))
    return (cos, sin) if out is None else (out[0].copy_(cos), out[1].copy_(sin))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out: Tensor | None = None) -> Tensor:
    rotated = 2 * cos.shape[-1]
    turned, rest = x[..., :rotated].float(), x[..., rotated:]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return into(out, torch.cat((turned.to(x.dtype), rest), dim=-1))


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    if _can_fuse(q, k, interleaved) and gpu_kernels.norm_rope(q, k, None, None, 0.0, cos, sin, False):
        return
    for x in (q, k):
        rope(x, cos, sin, interleaved=interleaved, out=x)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_plus_one: bool = False,
    interleaved: bool = False,
) -> None:
    weights = q_weight, k_weight
    if _can_fuse(q, k, interleaved) and gpu_kernels.norm_rope(q, k, *weights, eps, cos, sin, weight_plus_one):
        return
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(norm_rope(x, weight, eps, cos, sin, weight_plus_one=weight_plus_one, interleaved=interleaved))


def _can_fuse(q: Tensor, k: Tensor, interleaved: bool) -> bool:
    return not interleaved and on_gpu.is_half(q, k)


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
    """Apply qk_norm_rope to one of q and k."""
    normed = rms_norm(x.float(), weight, eps, weight_plus_one=weight_plus_one)
    return rope(normed, cos, sin, interleaved=interleaved).to(x.dtype)
