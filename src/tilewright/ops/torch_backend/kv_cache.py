"""Keys and values in pages of plain rows."""

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.kv_cache import LARGEST, KvCache, dequantized
from tilewright.ops.torch_backend.common import put_rows

LEAST_SCALED = 1e-30  # rows of smaller values count as zeros, as in the kernels


def elements_per_token(head_width: int) -> int:
    return 2 * head_width


def empty_pages(num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """[pages, 2, page_size, G, K]: the keys of a page, then its values.

    What 8 bits stand for is kept as the bf16 that it is read as: this backend shows their error, not their size.
    """
    stored = torch.bfloat16 if dtype in LARGEST else dtype
    return torch.zeros(num_pages, 2, page_size, num_heads, head_width, dtype=stored, device=backend.device())


def read_pages(cache: KvCache) -> tuple[Tensor, Tensor]:
    keys, values = cache.data.transpose(0, 1).flatten(1, 2)
    return keys, values


def kv_store(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    rows, size = rows_of(cache), cache.page_size
    key_rows = key_row_of(slots, size)
    if cache.dtype in LARGEST:
        k, v = (rounded(x, cache.dtype) for x in (k, v))
    put_rows(rows, key_rows, k)
    put_rows(rows, key_rows + size, v)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What x [T, G, K] is read as from a cache in 8 bits, a scale for each row."""
    largest = LARGEST[dtype]
    highest = x.float().abs().amax(-1, keepdim=True)  # NaN where one of the row is
    # A number divided by a tensor would be its reciprocal times the number, rounded twice.
    inverse = torch.where(highest < LEAST_SCALED, 0.0, torch.full_like(highest, largest) / highest)
    scaled = (x.float() * inverse).clamp(-largest, largest)
    numbers = (scaled.round() if dtype == torch.int8 else scaled).nan_to_num(0.0).to(dtype)
    is_number = highest.isfinite()
    scale = torch.where(is_number, torch.where(highest < LEAST_SCALED, 0.0, highest / largest), torch.nan)
    return dequantized(numbers, scale)


def rows_of(cache: KvCache) -> Tensor:
    """All keys and values [pages * 2 * page_size, G, K] as they lie, without a copy."""
    if cache.data.dim() != 5:
        raise ValueError("the cache has pages of the native backend, expected those of the torch backend")
    return cache.data.flatten(0, 2)


def key_row_of(slots: Tensor, page_size: int) -> Tensor:
    """Where the keys of slots lie among the rows; values lie page_size further on. Negative for negative slots."""
    return slots + slots.div(page_size, rounding_mode="floor") * page_size
