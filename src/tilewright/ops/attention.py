"""softmax(scale Q K^T + mask) V over packed sequences, and its cache; kernels in csrc/kernels/{attention,kv_cache}.

Keys and values lie in pages, in the layout of csrc/base/kv_layout.h, which attention reads directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty, empty_in_huge_pages

TILE_DEPTH = 32  # tokens in a tile of values: pages are whole ones

# 8-bit types, as the kernels number them: every row of a token and head has an fp32 scale, and a quant stands for the
# bf16 nearest to scale * quant (csrc/base/kv_bytes.h). Other types are stored as they are.
BYTE_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the quant of a row's largest value
SCALE_BYTES = 8  # of a key and a value


@dataclass(frozen=True)
class KvCache:
    """Keys and values of one layer: `num_pages` pages of `page_size` tokens, a multiple of 32."""

    data: Tensor  # native: [pages, G, elements of a head], in tiles; torch: [2, pages + 1, page_size, G, K]
    page_size: int
    head_width: int
    dtype: torch.dtype  # of keys and values; int8 and float8_e4m3fn have scales

    @classmethod
    def empty(cls, num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> KvCache:
        if page_size < TILE_DEPTH or page_size % TILE_DEPTH:
            raise ValueError(f"page_size is {page_size}, expected a multiple of {TILE_DEPTH}")
        return cls(empty_pages(num_pages, page_size, num_heads, head_width, dtype), page_size, head_width, dtype)

    @property
    def format(self) -> int:
        """The kernels' number of the 8-bit type; 0: the type of `data`."""
        return BYTE_FORMATS.get(self.dtype, 0)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0] if self.data.dim() == 3 else self.data.shape[1] - 1

    def read(self) -> tuple[Tensor, Tensor]:
        """Return a copy of all keys and values as plain [pages * page_size, G, K], for tests."""
        return read_pages(self)


@op
def kv_store(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    """Write k and v [T, G, K] to slots [T] int64 (page * page_size + offset); rows with a negative slot are skipped."""
    kernels.kv_store(view(k), view(v), view(cache.data), cache.page_size, cache.format, view(slots))


def bytes_per_token(head_width: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key and value in one head, including their scales."""
    scales = SCALE_BYTES if dtype in BYTE_FORMATS else 0
    return elements_per_token(head_width) * dtype.itemsize + scales


@op
def elements_per_token(head_width: int) -> int:
    """Return the elements of one token's key and value in one head; in tiles, padded to whole ones."""
    return kernels.kv_head_elements(TILE_DEPTH, head_width, 0) // TILE_DEPTH


@op
def empty_pages(num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """Return `KvCache.data` for zeroed pages."""
    format = BYTE_FORMATS.get(dtype, 0)
    per_head = kernels.kv_head_elements(page_size, head_width, format)
    stored = torch.uint8 if format else dtype
    return empty_in_huge_pages(num_pages * num_heads * per_head, stored).view(num_pages, num_heads, per_head)


@op
def read_pages(cache: KvCache) -> tuple[Tensor, Tensor]:
    """Return the result of `KvCache.read`."""
    pages, heads, _ = cache.data.shape
    size, width = cache.page_size, cache.head_width
    key_depth, value_width = -(-width // 32) * 32, -(-width // 16) * 16
    num_keys, num_values = size * key_depth, size * value_width
    keys = cache.data[..., :num_keys]
    values = cache.data[..., num_keys : num_keys + num_values]
    if cache.dtype != torch.float32:  # tile [16 pairs][16 columns][2]
        keys = keys.reshape(pages, heads, size // 16, key_depth // 32, 16, 16, 2).permute(0, 2, 5, 1, 3, 4, 6)
        values = values.reshape(pages, heads, size // 32, value_width // 16, 16, 16, 2).permute(0, 2, 4, 6, 1, 3, 5)
    else:  # tile [16 pairs][2][16 columns]
        keys = keys.reshape(pages, heads, size // 16, key_depth // 32, 16, 2, 16).permute(0, 2, 6, 1, 3, 4, 5)
        values = values.reshape(pages, heads, size // 32, value_width // 16, 16, 2, 16).permute(0, 2, 4, 5, 1, 3, 6)
    keys = keys.reshape(pages * size, heads, key_depth)[..., :width]
    values = values.reshape(pages * size, heads, value_width)[..., :width]
    if not cache.format:
        return keys, values
    scales = cache.data[..., num_keys + num_values :].view(torch.float32).reshape(pages, heads, 2, size)
    key_scales, value_scales = scales.permute(2, 0, 3, 1).reshape(2, pages * size, heads, 1)
    return dequantized(keys.view(cache.dtype), key_scales), dequantized(values.view(cache.dtype), value_scales)


def dequantized(quants: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 values that quants of 8 bits stand for."""
    return (quants.float() * scales).bfloat16()


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
    """Return attention of new tokens q [T, H, K] over a paged cache that already holds their own keys and values.

    Sequence b has queries query_starts[b] to query_starts[b + 1] and the first kv_lengths[b] keys of the pages
    block_table[b]; its last query is at the last key. One query is a decode step, many are a chunk of prefill, and both
    may be in one call. `causal=False` is cross-attention: every query sees all kv_lengths[b] keys. `window` > 0 hides
    keys at a distance of `window` or more; `soft_cap` > 0 bounds scores by cap * tanh(score / cap). The integer tensors
    are int32. A query that sees no key gives zeros.
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
    """Return attention within each of several packed sequences: q [T, H, K], k and v [S, G, K], starts [B + 1] int32.

    `mask` is bool (true = seen) or additive, [B or 1, H or 1, Sq or 1, Sk]: a size of 1 is broadcast. `window` > 0
    hides keys at a distance of `window` or more, to both sides unless causal. `max_length`: a bound on the sequences'
    lengths, if known, so that a GPU starts no blocks for longer ones; 0: unknown.
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
