"""Times two calls in turns, so that other load on the machine affects both."""

import statistics
from dataclasses import dataclass
from time import perf_counter

from tilewright.bench.row import Call, Calls

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
