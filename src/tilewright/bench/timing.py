"""Times two calls in turns, so that other load on the machine affects both, and probes the machine's current speed.

Kernels are compared with torch in the dtype in which torch multiplies fastest on this machine: without bf16 in hardware
it may multiply bf16 a hundred times slower than fp32 (0.3 GFLOP/s on a Neoverse-N1).
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
    """Seconds per call: the medians over the rounds, and the minima, which show how noisy the medians are."""

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
    """Median seconds per call of both, each round one sample of ours and one of torch's, in changing order."""
    ours, theirs = _Timer(calls.ours), _Timer(calls.torch)
    for round_number in range(rounds):
        for timer in (ours, theirs) if round_number % 2 else (theirs, ours):
            timer.sample()
    return Times(
        statistics.median(ours.samples), statistics.median(theirs.samples), min(ours.samples), min(theirs.samples)
    )


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
