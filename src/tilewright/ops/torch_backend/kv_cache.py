"""Keys and values in pages of plain rows."""

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.torch_backend.common import put_rows


def elements_per_token(head_width: int) -> int:
    return 2 * head_width


def empty_pages(num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """[pages, 2, page_size, G, K]: the keys of a page, then its values."""
    return torch.zeros(num_pages, 2, page_size, num_heads, head_width, dtype=dtype, device=backend.device())


def read_pages(cache: KvCache) -> tuple[Tensor, Tensor]:
    keys, values = cache.data.transpose(0, 1).flatten(1, 2)
    return keys, values


def kv_store(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    rows, size = rows_of(cache), cache.page_size
    key_rows = key_row_of(slots, size)
    put_rows(rows, key_rows, k)
    put_rows(rows, key_rows + size, v)


def rows_of(cache: KvCache) -> Tensor:
    """All keys and values [pages * 2 * page_size, G, K] as they lie, without a copy."""
    if cache.data.dim() != 5:
        raise ValueError("the cache has pages of the native backend, expected those of the torch backend")
    return cache.data.flatten(0, 2)


def key_row_of(slots: Tensor, page_size: int) -> Tensor:
    """Where the keys of slots lie among the rows; values lie page_size further on. Negative for negative slots."""
    return slots + slots.div(page_size, rounding_mode="floor") * page_size
