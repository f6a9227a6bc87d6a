"""Times two calls alternately, so that other load affects both, and probes the machine's current speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from time import perf_counter

import torch

from tilewright.bench.row import Call, Calls
from tilewright.bench.torch_dtype import dtype_name, fastest_dtype
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
