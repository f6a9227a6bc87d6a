"""The formats that are compared, by the names the flags give them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.types import RequestError

STORED = "stored"  # as the checkpoint has them, quantised or not
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class EvalFormat:
    """Of weights, by `quantize`'s names and a few more, and of keys and values."""

    name: str

    @property
    def engine_options(self) -> dict[str, Any]:
        """What opens an Engine in this format."""
        weights, _, kv = self.name.partition("/")
        options: dict[str, Any] = {}
        if weights in _DTYPES:
            options = {"quantize": "none", "dtype": _DTYPES[weights]}
        elif weights != STORED:
            options = {"quantize": weights}
        return options | ({"kv_cache_dtype": kv} if kv else {})


def parse_formats(text: str) -> list[EvalFormat]:
    """The formats of a list such as "none,int8,int4/int8"."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        weights, slash, kv = name.partition("/")
        if not weights or (slash and not kv):
            raise RequestError(f"--quantize has {name!r}, expected formats with commas between, such as none,int8,int4")
    if len(set(names)) < len(names):
        raise RequestError(f"--quantize is {text!r}, expected every format once")
    return [EvalFormat(name) for name in names]
