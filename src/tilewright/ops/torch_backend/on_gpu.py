"""Library kernels for bf16 on a GPU that do not widen their operands first.

Sums are fp32 within a kernel, and its result is rounded; an op made of several kernels rounds more often than the
native one. Nothing waits for the device, and every shape follows from those of the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HALVES = (torch.bfloat16, torch.float16)
MAX_HEAD_WIDTH = 256


def is_half(*tensors: Tensor) -> bool:
    """Return whether all are on a GPU, in one type of 16 bits."""
    first = tensors[0]
    return first.is_cuda and first.dtype in HALVES and all(t.dtype == first.dtype for t in tensors)


def product(x: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b in `out_dtype`; an fp32 result is not rounded before."""
    if out_dtype == torch.float32:
        flat = x.reshape(-1, x.shape[-1])
        y = torch.mm(flat, weight_NK.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias
    return functional.linear(x, weight_NK, None if bias is None else bias.to(x.dtype))


def can_attend(q: Tensor, soft_cap: float, mask: Tensor | None = None) -> bool:
    """Return whether the flash kernel supports such a call."""
    width = q.shape[-1]
    return is_half(q) and mask is None and soft_cap == 0 and width % 8 == 0 and width <= MAX_HEAD_WIDTH


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    causal: bool,
    window: int,
    key_counts: Tensor | None = None,
) -> Tensor:
    """Return attention over packed sequences. `key_counts`: keys of each, if fewer than its starts allow.

    No sequence has more than `max_queries` queries and `max_keys` keys; a closer bound starts fewer blocks.
    """
    reach: dict[str, Any] = {}
    if window > 0:
        reach = {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        0.0,
        causal,
        False,
        scale=scale,
        seqused_k=key_counts,
        **reach,
    )[0]


def experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activate: Any) -> Tensor:
    """Return the output of each of a token's experts [T, k, D]: tokens sorted by expert, one product for all."""
    num_tokens, num_choices = ids.shape
    expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(len(gate_up), device=x.device, dtype=expert.dtype), right=True)
    ends = ends.to(torch.int32)
    rows = x[order // num_choices]
    inner = activate(functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    outer = functional.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return torch.empty_like(outer).index_copy_(0, order, outer).view(num_tokens, num_choices, -1)
