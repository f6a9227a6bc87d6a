"""softmax(scale Q K^T + mask) V over packed sequences, and keys and values in pages of plain rows.

The keys that a query sees are a mask computed from the starts, over all keys of the call. Queries are processed in
blocks, so that scores do not grow with the square of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.attention import LARGEST, KvCache, dequantized
from tilewright.ops.torch_backend import gpu_kernels, on_gpu
from tilewright.ops.torch_backend.common import into, sequence_of_each

LEAST_SCALED = 1e-30  # rows of smaller values count as zeros, as in the kernels


def elements_per_token(head_width: int) -> int:
    return 2 * head_width


def empty_pages(num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """Return [2, pages + 1, page_size, G, K]: all keys, then all values; the last page receives skipped rows.

    8-bit values are stored as the bf16 they decode to: this backend shows their error, not their size.
    """
    stored = torch.bfloat16 if dtype in LARGEST else dtype
    return torch.zeros(2, num_pages + 1, page_size, num_heads, head_width, dtype=stored, device=backend.device())


def read_pages(cache: KvCache) -> tuple[Tensor, Tensor]:
    keys, values = cache.data[:, :-1].flatten(1, 2)
    return keys, values


def kv_store(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    """Store k and v; tokens of negative slots go to the last page, as counting them would wait for the device."""
    if k.is_cuda and cache.dtype not in LARGEST and gpu_kernels.store_rows(k, v, pages_of(cache), slots):
        return
    if cache.dtype in LARGEST:
        k, v = (rounded(x, cache.dtype) for x in (k, v))
    slots = slots.clamp(min=-1)
    for rows, x in zip(pages_of(cache).flatten(1, 2), (k, v), strict=True):
        rows[slots] = x.to(rows.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [T, G, K] as read from an 8-bit cache, with a scale for each row."""
    largest = LARGEST[dtype]
    highest = x.float().abs().amax(-1, keepdim=True)  # NaN if one of the row is
    # A number divided by a tensor would be computed as reciprocal times number, rounded twice.
    inverse = torch.where(highest < LEAST_SCALED, 0.0, torch.full_like(highest, largest) / highest)
    scaled = (x.float() * inverse).clamp(-largest, largest)
    quants = (scaled.round() if dtype == torch.int8 else scaled).nan_to_num(0.0).to(dtype)
    is_number = highest.isfinite()
    scale = torch.where(is_number, torch.where(highest < LEAST_SCALED, 0.0, highest / largest), torch.nan)
    return dequantized(quants, scale)


def pages_of(cache: KvCache) -> Tensor:
    """Return all keys and values [2, pages + 1, page_size, G, K] as stored."""
    if cache.data.dim() != 5:
        raise ValueError("the cache has pages of the native backend, expected those of the torch backend")
    return cache.data


BLOCK_ELEMENTS = 1 << 25  # of scores, or of gathered keys: 128 MiB in fp32


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
    """Attend over pages. All columns of block_table are read: it should be as narrow as the longest sequence allows.

    In a decode step each query reads the gathered keys of its own sequence. In prefill, where that would copy them for
    every query, all queries use one matrix of the keys of all sequences, most of them masked.
    """
    num_tokens, num_sequences = len(q), len(kv_lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if num_tokens == num_sequences and on_gpu.can_attend(q, soft_cap):
        attended = gpu_kernels.decode_attention(q, pages_of(cache), block_table, kv_lengths, scale, window, out)
        if attended is not None:
            return attended
    keys, values = pages_of(cache)[:, block_table.clamp(min=0)].flatten(2, 3)  # [B, L, G, K] each
    num_keys = keys.shape[1]
    if on_gpu.can_attend(q, soft_cap):
        starts = torch.arange(0, (num_sequences + 1) * num_keys, num_keys, dtype=torch.int32, device=q.device)
        packed = keys.flatten(0, 1), values.flatten(0, 1)
        max_queries = num_tokens if num_tokens > num_sequences else 1
        options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "key_counts": kv_lengths}
        return into(out, on_gpu.attend(q, *packed, query_starts, starts, max_queries, num_keys, **options))
    sequence = sequence_of_each(query_starts, num_tokens)
    # The last query is at the last key.
    places = torch.arange(num_tokens, device=q.device) - query_starts[1:][sequence] + kv_lengths[sequence]
    key_places = torch.arange(num_keys, device=q.device)

    def decode(block: slice) -> Tensor:
        own = sequence[block]
        seen = (key_places < kv_lengths[own, None]) & _visible(places[block], key_places, causal, window)
        return _attend(q[block], keys[own], values[own], seen[:, None], scale, soft_cap)

    if num_tokens <= num_sequences:
        return into(out, _in_blocks(decode, q, keys[0].numel()))

    all_keys, all_values, all_places = keys.flatten(0, 1), values.flatten(0, 1), key_places.repeat(num_sequences)
    key_sequence = torch.arange(num_sequences, device=q.device).repeat_interleave(num_keys)
    is_key = all_places < kv_lengths[key_sequence]

    def prefill(block: slice) -> Tensor:
        seen = (sequence[block, None] == key_sequence) & is_key & _visible(places[block], all_places, causal, window)
        return _attend(q[block], all_keys, all_values, seen[:, None], scale, soft_cap)

    return into(out, _in_blocks(prefill, q, len(all_keys) * q.shape[1]))


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
    key_starts = query_starts if key_starts is None else key_starts
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if on_gpu.can_attend(q, soft_cap, mask):
        longest = max_length or len(q), max_length or len(k)
        return into(
            out,
            on_gpu.attend(q, k, v, query_starts, key_starts, *longest, scale=scale, causal=causal, window=window),
        )
    query_sequence, key_sequence = sequence_of_each(query_starts, len(q)), sequence_of_each(key_starts, len(k))
    query_places = torch.arange(len(q), device=q.device) - query_starts[query_sequence]
    key_places = torch.arange(len(k), device=q.device) - key_starts[key_sequence]
    # The last query is at the last key.
    ahead = (key_starts[1:] - key_starts[:-1]) - (query_starts[1:] - query_starts[:-1])

    def attend(block: slice) -> Tensor:
        sequence, places = query_sequence[block], query_places[block]
        seen = (sequence[:, None] == key_sequence) & _visible(places + ahead[sequence], key_places, causal, window)
        seen, added = seen[:, None], None
        if mask is not None:
            of_pairs = _mask_of_pairs(mask, sequence, places, key_places)
            if mask.dtype == torch.bool:
                seen = seen & of_pairs
            else:
                added = of_pairs.float()
        return _attend(q[block], k, v, seen, scale, soft_cap, added)

    return into(out, _in_blocks(attend, q, len(k) * q.shape[1]))


def _visible(query_places: Tensor, key_places: Tensor, causal: bool, window: int) -> Tensor:
    """Return [T, S]: whether a query may see a key, by their positions."""
    distance = query_places[:, None] - key_places
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible = visible & (distance >= 0)
    if window > 0:
        visible = visible & (distance.abs() < window)
    return visible


def _mask_of_pairs(mask: Tensor, sequence: Tensor, query_places: Tensor, key_places: Tensor) -> Tensor:
    """Return [T, H or 1, S] of a mask [B or 1, H or 1, Sq or 1, Sk]; anything for keys of other sequences."""
    of_sequence = sequence if mask.shape[0] > 1 else torch.zeros_like(sequence)
    row = query_places.clamp(max=mask.shape[2] - 1)
    column = key_places.clamp(max=mask.shape[3] - 1)
    return mask[of_sequence[:, None], :, row[:, None], column].transpose(1, 2)


def _in_blocks(attend: Callable[[slice], Tensor], q: Tensor, elements_per_query: int) -> Tensor:
    """Return the result of `attend` for blocks of queries, as large as the memory bound allows."""
    size = max(BLOCK_ELEMENTS // max(elements_per_query, 1), 1)
    blocks = [attend(slice(begin, begin + size)) for begin in range(0, len(q), size)]
    return torch.cat(blocks) if blocks else torch.empty_like(q)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    added: Tensor | None = None,
) -> Tensor:
    """Attend q [T, H, K] to keys of all queries [S, G, K] or of each [T, S, G, K]; seen, added [T, H or 1, S]."""
    own = "t" if k.dim() == 4 else ""
    q_TGRK = q.float().unflatten(1, (k.shape[-2], -1))
    scores = torch.einsum(f"tgrk,{own}sgk->tgrs", q_TGRK, k.float()).flatten(1, 2) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if added is not None:
        scores = scores + added
    scores = scores.masked_fill(~seen, -torch.inf)
    sees_any = (scores > -torch.inf).any(-1, keepdim=True) | scores.isnan().any(-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(~sees_any, 0.0)  # a query that sees no key gives zeros
    # 0 times NaN is NaN: a NaN of another sequence must not get here, one that is seen must.
    is_bad = ~v.isfinite().all(-1).all(-1)
    values = v.float().masked_fill(is_bad[..., None, None], 0.0)
    attended = torch.einsum(f"tgrs,{own}sgk->tgrk", weights.unflatten(1, (k.shape[-2], -1)), values).flatten(1, 2)
    sees_bad = (seen & (is_bad[:, None] if own else is_bad)).any(-1, keepdim=True)
    return attended.masked_fill(sees_bad, torch.nan).to(q.dtype)
