"""The types that keys and values are kept in, by their names."""

from __future__ import annotations

import torch

from tilewright.types import RequestError

_BYTE_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def kv_byte_dtype(name: str) -> torch.dtype | None:
    """The type of 8 bits that a name stands for; None for "auto": keys and values are in the model's own type."""
    if name not in _BYTE_DTYPES:
        raise RequestError(f"kv_cache_dtype is {name!r}, expected {', '.join(_BYTE_DTYPES)}")
    return _BYTE_DTYPES[name]
