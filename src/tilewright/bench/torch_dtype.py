"""Torch's fastest dtype on this machine, in which kernels are compared with it.

Without bf16 in hardware torch may multiply bf16 a hundred times slower than fp32 (0.3 GFLOP/s on a Neoverse-N1). The
file imports nothing of ours: benchmarks run it in environments that have another torch and no Tilewright.
"""

from __future__ import annotations

import warnings
from functools import cache
from time import perf_counter

import torch

# Rows, inputs, outputs of the timed products. Torch has separate code for a single row, which is memory-bound: its
# matrix is larger than a core's caches. At 0.3 GFLOP/s a product takes a quarter of a second.
MATRIX, VECTOR = (128, 512, 512), (1, 4096, 4096)
MIN_TURNS, MAX_TURNS = 2, 50  # the first compiles oneDNN's kernel
ENOUGH_S = 0.3  # of both types together


def fastest_dtype(num_rows: int) -> torch.dtype:
    """Return bfloat16 or float32, whichever torch multiplies `num_rows` rows in faster; timed once, within a second."""
    return _timed(VECTOR if num_rows == 1 else MATRIX)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def by_product() -> dict[str, str]:
    """Return the name of the fastest dtype for each kind of product."""
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
        for dtype, pair in operands.items():  # alternating, so that other load affects both
            times_s[dtype].append(_product_s(*pair))
    return min(times_s, key=lambda dtype: min(times_s[dtype]))


def _product_s(x: torch.Tensor, weight: torch.Tensor) -> float:
    with torch.inference_mode(), warnings.catch_warnings():
        # On a CPU without bf16 instructions, torch warns with a trace of its calls.
        warnings.simplefilter("ignore")
        begin = perf_counter()
        torch.nn.functional.linear(x, weight)
        return perf_counter() - begin
