"""Keys and values in pages of plain rows."""

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.kv_cache import LARGEST, KvCache, dequantized
from tilewright.ops.torch_backend import gpu_kernels

LEAST_SCALED = 1e-30  # rows of smaller values count as zeros, as in the kernels


def elements_per_token(head_width: int) -> int:
    return 2 * head_width


def empty_pages(num_pages: int, page_size: int, num_heads: int, head_width: int, dtype: torch.dtype) -> Tensor:
    """[2, pages + 1, page_size, G, K]: all keys, then all values; the last page takes what belongs nowhere.

    What 8 bits stand for is kept as the bf16 that it is read as: this backend shows their error, not their size.
    """
    stored = torch.bfloat16 if dtype in LARGEST else dtype
    return torch.zeros(2, num_pages + 1, page_size, num_heads, head_width, dtype=stored, device=backend.device())


def read_pages(cache: KvCache) -> tuple[Tensor, Tensor]:
    keys, values = cache.data[:, :-1].flatten(1, 2)
    return keys, values


def kv_store(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    """To leave out tokens of negative slots one would have to wait for their number: they go to the last page."""
    if k.is_cuda and cache.dtype not in LARGEST and gpu_kernels.store_rows(k, v, pages_of(cache), slots):
        return
    if cache.dtype in LARGEST:
        k, v = (rounded(x, cache.dtype) for x in (k, v))
    slots = slots.clamp(min=-1)
    for rows, x in zip(pages_of(cache).flatten(1, 2), (k, v), strict=True):
        rows[slots] = x.to(rows.dtype)


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


def pages_of(cache: KvCache) -> Tensor:
    """All keys and values [2, pages + 1, page_size, G, K] as they lie."""
    if cache.data.dim() != 5:
        raise ValueError("the cache has pages of the native backend, expected those of the torch backend")
    return cache.data
