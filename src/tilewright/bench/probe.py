"""The machine's current speed, measured briefly between the rounds of a benchmark: it drifts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from time import perf_counter

import torch

from tilewright import machine
from tilewright.bench.torch_dtype import dtype_name, fastest_dtype

GEMM_SHAPE = (2048, 4096, 4096)  # rows, inputs, outputs: 69 GFLOP, 80 MB, over any cache but far from memory-bound
NUM_GEMMS = 4
MAX_GEMM_S = 1.0  # in all: on a slow machine one product takes seconds, and is enough
SECONDS = 0.5  # of the kernels that read and that multiply, beside the matrix products


@dataclass(frozen=True)
class Probe:
    """The best of several short passes, and the median of the reading ones, to show how steady they are."""

    read_gb_s: float
    read_gb_s_median: float
    gemm_tflops: float  # torch's matrix product, in its fastest dtype on this machine
    peak_tflops: float  # bf16 multiply-adds with everything in registers
    gemm_dtype: str  # that dtype


def probe() -> Probe:
    """A Probe, in a second or two."""
    measured = machine.measure(SECONDS)
    rows, inputs, outputs = GEMM_SHAPE
    generator = torch.Generator().manual_seed(0)
    dtype = fastest_dtype(rows)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    times_s: list[float] = []
    with torch.inference_mode():
        while len(times_s) <= NUM_GEMMS and sum(times_s) < MAX_GEMM_S:  # the first one compiles oneDNN's kernel
            begin = perf_counter()
            torch.nn.functional.linear(x, weight)
            times_s.append(perf_counter() - begin)
    gemm_tflops = 2 * rows * inputs * outputs / min(times_s) / 1e12
    return Probe(measured.read_gb_s, measured.read_gb_s_median, gemm_tflops, measured.bf16_tflops, dtype_name(dtype))


def between(before: Probe, after: Probe) -> Probe:
    """The mean of two probes, for what ran between them."""
    return _combined([before, after], statistics.mean)


def median(probes: Sequence[Probe]) -> Probe:
    """The median of each of their figures."""
    return _combined(probes, statistics.median)


def _combined(probes: Sequence[Probe], combine: Callable[[list[float]], float]) -> Probe:
    names = [field.name for field in fields(Probe) if field.name != "gemm_dtype"]  # the same in all probes of a process
    figures = {name: combine([getattr(probe, name) for probe in probes]) for name in names}
    return Probe(**figures, gemm_dtype=probes[0].gemm_dtype)
