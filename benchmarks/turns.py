"""Calls timed in turns between two probes of the machine, for the benchmarks beside diffusers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from tilewright.bench.timing import Probe, between, probe

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Turns:
    """Seconds of each call in every round, one of which is called "ours", and the machine's speed meanwhile."""

    times_s: Mapping[str, Sequence[float]]
    limits: Probe

    def median_s(self, name: str) -> float:
        return statistics.median(self.times_s[name])

    def beside_ours(self, name: str) -> str:
        """How many times as long the call took as ours: the median of the rounds, the least and the greatest."""
        pairs = zip(self.times_s[name], self.times_s["ours"], strict=True)
        ratios = sorted(their_s / our_s for their_s, our_s in pairs)
        return f"{statistics.median(ratios):.2f} x ours ({ratios[0]:.2f}-{ratios[-1]:.2f})"

    def speed(self, name: str, num_operations: float) -> str:
        """Operations per second, and their share of the multiply peak."""
        tflops = num_operations / self.median_s(name) / 1e12
        return f"{tflops:.2f} TFLOP/s, {tflops / self.limits.peak_tflops:.0%} of the peak"


def timed_in_turns(calls: Calls, rounds: int) -> Turns:
    """Time each call once per round, after one that warms up."""
    for call in calls.values():
        call()
    before = probe()
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin_s = perf_counter()
            call()
            times_s[name].append(perf_counter() - begin_s)
    return Turns(times_s, between(before, probe()))
