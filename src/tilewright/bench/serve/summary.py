"""The summary of many samples: means and percentiles, throughput, goodput and failures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tilewright.bench.serve.sample import Sample
from tilewright.types import RequestError

PERCENTS = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile of ascending values, interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Distribution:
    """Mean, percentiles and maximum of some values, and their number."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Return the distribution of the values; None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTS)
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1], len(ordered))


@dataclass(frozen=True)
class Metric:
    """A quantity of samples; a sample may have several values of it."""

    title: str
    unit: str  # in the table; values are in seconds or tokens
    scale: float  # from a value to the unit
    values: Callable[[Sample], Iterable[float | None]]


METRICS = {
    "ttft": Metric("first token (TTFT)", "s", 1, lambda sample: [sample.first_token_s]),
    "itl": Metric("between chunks (ITL)", "ms", 1000, lambda sample: sample.gaps_s),
    "tpot": Metric("per token after the first (TPOT)", "ms", 1000, lambda sample: [sample.token_s]),
    "e2e": Metric("whole answer (E2E)", "s", 1, lambda sample: [sample.total_s]),
    "prompt_tokens": Metric("prompt", "tokens", 1, lambda sample: [sample.prompt_tokens]),
    "cached_tokens": Metric("prompt, cached", "tokens", 1, lambda sample: [sample.cached_tokens]),
    "output_tokens": Metric("answer", "tokens", 1, lambda sample: [sample.output_tokens]),
}
LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class Goodput:
    """The requests whose latencies are all within their limits; failed ones do not count."""

    limits_s: dict[str, float]
    share: float  # of all requests
    requests_per_s: float


@dataclass(frozen=True)
class Summary:
    """The totals of a run. Throughput counts whole answers, from the first request sent to the last answer's end."""

    num_answered: int
    num_failed: int
    num_shorter: int  # answers with fewer tokens than requested
    num_counted_by_chunks: int
    num_without_token: int
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None  # None: the server does not report prompt tokens
    mean_concurrency: float
    distributions: dict[str, Distribution]
    goodput: Goodput | None
    failures: dict[str, dict[str, int]]  # kind -> message -> count


def parse_goodput(text: str) -> dict[str, float]:
    """Return limits such as "ttft:2.0,itl:0.1" by latency, in seconds; raise RequestError if malformed."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*:\s*(\d+(?:\.\d*)?|\.\d+)\s*", part)
        if not match or match[1] not in LATENCIES:
            names = ", ".join(LATENCIES)
            raise RequestError(f"--goodput is {text!r}, expected such as ttft:2.0,itl:0.1 of {names}, in seconds")
        limits[match[1]] = float(match[2])
    return limits


def is_good(sample: Sample, limits_s: dict[str, float]) -> bool:
    """Return whether a request was answered within all limits; itl's limit applies to every gap."""
    if sample.failure or ("ttft" in limits_s and sample.first_token_s is None):
        return False
    return all(
        value is None or value <= limit_s
        for name, limit_s in limits_s.items()
        for value in METRICS[name].values(sample)
    )


def summarise(samples: Sequence[Sample], limits_s: dict[str, float] | None = None) -> Summary:
    """Return the Summary of at least one sample."""
    answered = [sample for sample in samples if not sample.failure]
    wall_s = max(sample.sent_s + sample.total_s for sample in samples) - min(sample.sent_s for sample in samples)
    wall_s = max(wall_s, 1e-9)  # all may fail at once
    output_tokens = sum(sample.output_tokens for sample in answered)
    prompt_tokens = [sample.prompt_tokens for sample in answered]
    known = [count for count in prompt_tokens if count is not None]
    total_tokens = output_tokens + sum(known) if len(known) == len(prompt_tokens) else None
    failures: dict[str, Counter[str]] = {}
    for sample in samples:
        if sample.failure:
            failures.setdefault(sample.failure.kind, Counter())[sample.failure.message] += 1
    goodput = None
    if limits_s:
        num_good = sum(is_good(sample, limits_s) for sample in samples)
        goodput = Goodput(limits_s, num_good / len(samples), num_good / wall_s)
    return Summary(
        num_answered=len(answered),
        num_failed=len(samples) - len(answered),
        num_shorter=sum(sample.output_tokens < sample.wanted_tokens for sample in answered),
        num_counted_by_chunks=sum(sample.is_counted_by_chunks for sample in answered),
        num_without_token=sum(sample.first_token_s is None for sample in answered),
        wall_s=wall_s,
        requests_per_s=len(answered) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=None if total_tokens is None else total_tokens / wall_s,
        mean_concurrency=sum(sample.total_s for sample in samples) / wall_s,
        distributions=_distributions(answered),
        goodput=goodput,
        failures={kind: dict(counts.most_common()) for kind, counts in failures.items()},
    )


def _distributions(answered: Sequence[Sample]) -> dict[str, Distribution]:
    found = {}
    for name, metric in METRICS.items():
        values = (value for sample in answered for value in metric.values(sample) if value is not None)
        if spread := Distribution.of(values):
            found[name] = spread
    return found
