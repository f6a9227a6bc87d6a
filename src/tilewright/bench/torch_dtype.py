"""The dtype in which torch multiplies fastest on this machine, which our kernels are compared with.

Without bf16 in hardware torch may multiply it a hundred times slower than fp32 (0.3 GFLOP/s on a Neoverse-N1): a
benchmark of it would take hours and mean nothing. Imports nothing of ours: workers of other environments run it too.
"""

from __future__ import annotations

import warnings
from functools import cache
from time import perf_counter

import torch

# Rows, inputs, outputs of what is timed. Torch has code of its own for a single row, which waits for memory: its matrix
# is larger than a core's caches. At 0.3 GFLOP/s a product takes a quarter of a second.
MATRIX, VECTOR = (128, 512, 512), (1, 4096, 4096)
MIN_TURNS, MAX_TURNS = 2, 50  # the first compiles oneDNN's kernel
ENOUGH_S = 0.3  # of both types together


def fastest_dtype(num_rows: int) -> torch.dtype:
    """bfloat16 or float32, whichever torch multiplies so many rows faster in; timed once, in a second at most."""
    return _timed(VECTOR if num_rows == 1 else MATRIX)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def by_product() -> dict[str, str]:
    """The dtype's name for each kind of product."""
    return {"matrix": dtype_name(_timed(MATRIX)), "vector": dtype_name(_timed(VECTOR))}


@cache
def _timed(shape: tuple[int, int, int]) -> torch.dtype:
    rows, inputs, outputs = shape
    x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    operands = {dtype: (x.to(dtype), weight.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    times_s: dict[torch.dtype, list[float]] = {dtype: [] for dtype in operands}
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and sum(map(sum, times_s.values())) > ENOUGH_S:
            break
        for dtype, pair in operands.items():  # in turns, so that other load affects both
            times_s[dtype].append(_product_s(*pair))
    return min(times_s, key=lambda dtype: min(times_s[dtype]))


def _product_s(x: torch.Tensor, weight: torch.Tensor) -> float:
    with torch.inference_mode(), warnings.catch_warnings():
        # Where the CPU has no instructions for bf16, torch warns of it, with a trace of its own calls.
        warnings.simplefilter("ignore")
        begin = perf_counter()
        torch.nn.functional.linear(x, weight)
        return perf_counter() - begin
