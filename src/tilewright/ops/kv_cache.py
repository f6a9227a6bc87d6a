"""Keys and values in pages, written as attention reads them; the kernels' layout is in csrc/base/kv_layout.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.memory import empty_in_huge_pages
from tilewright.ops.native import kernels, view

TILE_DEPTH = 32  # tokens in a tile of values: pages are whole ones


@dataclass(frozen=True)
class KvCache:
    """The keys and values of one layer: `num_pages` pages of `page_size` tokens, a multiple of 32."""

    data: Tensor  # native: [pages, G, elements of a head], in tiles; torch: [pages, 2, page_size, G, K]
    page_size: int
    head_width: int

    @classmethod
    def empty(cls, num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> KvCache:
        if page_size < TILE_DEPTH or page_size % TILE_DEPTH:
            raise ValueError(f"page_size is {page_size}, expected a multiple of {TILE_DEPTH}")
        return cls(empty_pages(num_pages, page_size, num_heads, head_width, dtype), page_size, head_width)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values as plain [pages * page_size, G, K]: for tests, a copy."""
        return read_pages(self)


@op
def kv_store(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    """Writes k and v [T, G, K] to slots [T] int64 (page * page_size + place); a negative slot is left out."""
    kernels.kv_store(view(k), view(v), view(cache.data), cache.page_size, view(slots))


@op
def elements_per_token(head_width: int) -> int:
    """What the key and the value of one token take in one head; in tiles, padded to whole ones."""
    return kernels.kv_head_elements(TILE_DEPTH, head_width) // TILE_DEPTH


@op
def empty_pages(num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """`KvCache.data` of pages that are zero."""
    per_head = kernels.kv_head_elements(page_size, head_width)
    return empty_in_huge_pages(num_pages * num_heads * per_head, dtype).view(num_pages, num_heads, per_head)


@op
def read_pages(cache: KvCache) -> tuple[Tensor, Tensor]:
    """What `KvCache.read` gives."""
    pages, heads, _ = cache.data.shape
    size, width = cache.page_size, cache.head_width
    key_depth, value_width = -(-width // 32) * 32, -(-width // 16) * 16
    keys = cache.data[..., : size * key_depth]
    values = cache.data[..., size * key_depth :]
    if cache.data.dtype == torch.bfloat16:  # tile [16 pairs][16 columns][2]
        keys = keys.reshape(pages, heads, size // 16, key_depth // 32, 16, 16, 2).permute(0, 2, 5, 1, 3, 4, 6)
        values = values.reshape(pages, heads, size // 32, value_width // 16, 16, 16, 2).permute(0, 2, 4, 6, 1, 3, 5)
    else:  # tile [16 pairs][2][16 columns]
        keys = keys.reshape(pages, heads, size // 16, key_depth // 32, 16, 2, 16).permute(0, 2, 6, 1, 3, 4, 5)
        values = values.reshape(pages, heads, size // 32, value_width // 16, 16, 2, 16).permute(0, 2, 4, 5, 1, 3, 6)
    keys = keys.reshape(pages * size, heads, key_depth)[..., :width]
    return keys, values.reshape(pages * size, heads, value_width)[..., :width]
