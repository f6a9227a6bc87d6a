"""softmax(scale Q K^T + mask) V over packed sequences; kernels in csrc/kernels/attention."""

from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty


@op
def paged_attention(
    q: Tensor,
    cache: KvCache,
    block_table: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens q [T, H, K] over a paged cache that already holds their own keys and values.

    Sequence b has queries query_starts[b] to query_starts[b + 1] and the first kv_lengths[b] keys of the pages
    block_table[b]; its last query stands at the last key. One query is a decode step, many are a chunk of prefill, and
    both may be in one call. `causal=False` is cross-attention: every query sees all kv_lengths[b] keys.
    `window` > 0 hides keys at a distance of `window` or more; `soft_cap` > 0 bounds scores by cap * tanh(score / cap).
    The integer tensors are int32. A query that sees no key gives zeros.
    """
    if out is None:
        out = empty(q.shape, q.dtype)
    kernels.paged_attention(
        view(q),
        view(cache.data),
        cache.page_size,
        cache.format,
        view(block_table),
        view(query_starts),
        view(kv_lengths),
        view(out),
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        window,
        soft_cap,
    )
    return out


@op
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    mask: Tensor | None = None,
    max_length: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention within each of several packed sequences: q [T, H, K], k and v [S, G, K], starts [B + 1] int32.

    `mask` is bool (true = seen) or additive, [B or 1, H or 1, Sq or 1, Sk]: a size of 1 is broadcast, not stored.
    `window` > 0 hides keys at a distance of `window` or more, to both sides unless causal. `max_length`: that no
    sequence exceeds, where the caller knows it; 0: any. A GPU then starts no blocks of work for what cannot be there.
    """
    if out is None:
        out = empty(q.shape, q.dtype)
    kernels.varlen_attention(
        view(q),
        view(k),
        view(v),
        view(query_starts),
        view(query_starts if key_starts is None else key_starts),
        view_or_none(mask),
        view(out),
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        window,
        soft_cap,
    )
    return out
