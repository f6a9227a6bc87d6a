"""Times two calls alternately, so that other load affects both, and probes the machine's current speed.

Kernels are compared with torch in torch's fastest dtype on this machine: without bf16 in hardware, torch may multiply
bf16 a hundred times slower than fp32 (0.3 GFLOP/s on a Neoverse-N1).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from time import perf_counter

import torch

from tilewright.bench.row import Call, Calls
from tilewright.engine.measure import machine

# Shorter calls are timed in groups: the clock and the loop cost a microsecond.
MIN_SAMPLE_S = 5e-4


@dataclass(frozen=True)
class Times:
    """Seconds per call: medians over the rounds, and minima, which show how noisy the medians are."""

    ours_s: float
    torch_s: float
    ours_least_s: float
    torch_least_s: float


class _Timer:
    """One of the two calls, with its position in the rotation."""

    def __init__(self, call: Call):
        self.call = call
        self.num_calls = 0
        self.samples: list[float] = []
        self.repeats = 1
        first = max(self._time_one(), 1e-7)  # also the warm-up
        self.repeats = max(1, round(MIN_SAMPLE_S / min(first, max(self._time_one(), 1e-7))))

    def _time_one(self) -> float:
        begin = perf_counter()
        for _ in range(self.repeats):
            self.call(self.num_calls)
            self.num_calls += 1
        return (perf_counter() - begin) / self.repeats

    def sample(self) -> None:
        self.samples.append(self._time_one())


def interleaved(calls: Calls, rounds: int) -> Times:
    """Return the times of both calls; each round takes a sample of each, in alternating order."""
    ours, theirs = _Timer(calls.ours), _Timer(calls.torch)
    for round_number in range(rounds):
        for timer in (ours, theirs) if round_number % 2 else (theirs, ours):
            timer.sample()
    return Times(
        statistics.median(ours.samples), statistics.median(theirs.samples), min(ours.samples), min(theirs.samples)
    )


GEMM_SHAPE = (2048, 4096, 4096)  # rows, inputs, outputs: 69 GFLOP, 80 MB, above any cache but not memory-bound
NUM_GEMMS = 4
MAX_GEMM_S = 1.0  # in total: on a slow machine one product takes seconds, and suffices
SECONDS = 0.5  # for the kernels that measure reading and multiplying, beside the matrix products


@dataclass(frozen=True)
class Probe:
    """The best of several short passes, and the median of the reading passes, which shows how steady they are."""

    read_gb_s: float
    read_gb_s_median: float
    gemm_tflops: float  # torch's matrix product, in its fastest dtype on this machine
    peak_tflops: float  # bf16 multiply-adds in registers
    gemm_dtype: str  # the dtype of gemm_tflops


def probe() -> Probe:
    """Measure a Probe, in one or two seconds."""
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
    """Return the mean of two probes, for work that ran between them."""
    return _combined([before, after], statistics.mean)


def median(probes: Sequence[Probe]) -> Probe:
    """Return the medians of the probes' figures."""
    return _combined(probes, statistics.median)


def _combined(probes: Sequence[Probe], combine: Callable[[list[float]], float]) -> Probe:
    names = [field.name for field in fields(Probe) if field.name != "gemm_dtype"]  # the same in all probes of a process
    figures = {name: combine([getattr(probe, name) for probe in probes]) for name in names}
    return Probe(**figures, gemm_dtype=probes[0].gemm_dtype)


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
