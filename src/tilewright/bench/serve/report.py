"""Reports a run as a table, JSON and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.bench import report
from tilewright.bench.report import aligned, write_document
from tilewright.bench.serve.sample import Sample
from tilewright.bench.serve.summary import METRICS, PERCENTS, Summary

MAX_MESSAGES = 3  # per kind of failure, in the table


def as_table(summary: Summary, client_cpu_share: float, probes: Sequence[dict[str, Any]]) -> str:
    """Return the run as a table; `probes` are of the machine before and after, if the server runs on it."""
    lines = []
    if summary.num_answered:
        lines += [*_latencies(summary), ""]
    lines.append(
        f"{summary.num_answered} answered, {summary.num_failed} failed in {summary.wall_s:.1f} s: "
        f"{summary.requests_per_s:.3g} requests/s, {summary.mean_concurrency:.1f} at once on average"
    )
    if summary.num_answered:
        total = summary.total_tokens_per_s
        with_prompts = "the server reports no prompt tokens" if total is None else f"{total:.4g} with the prompts'"
        lines.append(f"tokens/s: {summary.output_tokens_per_s:.4g} of answers, {with_prompts}")
    if summary.goodput:
        limits = ", ".join(f"{name} <= {limit_s:g} s" for name, limit_s in summary.goodput.limits_s.items())
        lines.append(
            f"goodput: {summary.goodput.share:.1%} of the requests kept {limits}: "
            f"{summary.goodput.requests_per_s:.3g} requests/s"
        )
    lines += _remarks(summary)
    lines.append(f"the client used {client_cpu_share:.2%} of a CPU")
    if probes:
        mean = mean_probe(probes)
        lines.append(
            f"the machine before and after, means: read {mean['read_gb_s']:.1f} GB/s at best, "
            f"{mean['read_gb_s_median']:.1f} typically, matrix product {mean['gemm_tflops']:.2f} TFLOP/s "
            f"({mean['gemm_dtype']}), multiply peak {mean['peak_tflops']:.2f} TFLOP/s"
        )
    return "\n".join(lines)


def mean_probe(probes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of the probes' figures, with all dtypes that they chose."""
    types = dict.fromkeys(probe["gemm_dtype"] for probe in probes)
    names = [name for name in probes[0] if name != "gemm_dtype"]
    means = {name: statistics.mean(probe[name] for probe in probes) for name in names}
    return means | {"gemm_dtype": " and ".join(types)}


def _latencies(summary: Summary) -> list[str]:
    names = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")
    rows = [("", *names, "unit")]
    for key, distribution in summary.distributions.items():
        metric = METRICS[key]
        rows.append(
            (metric.title, *(_number(getattr(distribution, name) * metric.scale) for name in names), metric.unit)
        )
    return aligned(rows, left=(0, len(rows[0]) - 1))


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def _remarks(summary: Summary) -> list[str]:
    """Return notes on what the numbers omit or assume, and the failures."""
    found = []
    for count, remark in (
        (summary.num_shorter, "answers had fewer tokens than requested: the server ignores ignore_eos"),
        (summary.num_counted_by_chunks, "answers' tokens were counted by chunks: the server sent no usage"),
        (summary.num_without_token, "answers had no token"),
    ):
        if count:
            found.append(f"{count} {remark}")
    for kind, messages in summary.failures.items():
        found.append(f"{sum(messages.values())} failed, {kind}:")
        found += [f"  {count} x {message}" for message, count in list(messages.items())[:MAX_MESSAGES]]
        if len(messages) > MAX_MESSAGES:
            found.append(f"  and {len(messages) - MAX_MESSAGES} other messages")
    return found


def write_json(path: Path, summary: Summary, samples: Sequence[Sample], about: dict[str, Any]) -> None:
    """Write the run, all its samples, and `about`: the server and the machine."""
    figures = asdict(summary)
    distributions = figures.pop("distributions")
    # In seconds and tokens, unlike the table.
    document = {"figures": distributions, "totals": figures, "samples": [asdict(sample) for sample in samples]}
    write_document(path, about | document)


def write_plot(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Plot each request over time, and the distributions of TTFT and inter-token latency."""
    from matplotlib.figure import Figure  # imported here: only plots need it

    answered = [sample for sample in samples if not sample.failure]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    requests, first, gaps = figure.subplots(1, 3)
    for sample in samples:
        wait_s = sample.total_s if sample.first_token_s is None else sample.first_token_s
        color = "C3" if sample.failure else "C1"
        requests.barh(sample.number, wait_s, left=sample.sent_s, color=color)
        requests.barh(sample.number, sample.total_s - wait_s, left=sample.sent_s + wait_s, color="C0")
    requests.set(title="until the first token, and to the end", xlabel="s", ylabel="request")
    requests.invert_yaxis()
    firsts_s = sorted(sample.first_token_s for sample in answered if sample.first_token_s is not None)
    gaps_ms = sorted(1000 * gap_s for sample in answered for gap_s in sample.gaps_s)
    for axes, values, name, unit in ((first, firsts_s, "first token", "s"), (gaps, gaps_ms, "between chunks", "ms")):
        shares = [100 * (index + 1) / len(values) for index in range(len(values))]
        axes.step(values, shares, where="post")
        axes.set(title=name, xlabel=unit, ylabel="% took no longer", ylim=(0, 100))
        axes.set_xlim(left=0)
        axes.grid(True, alpha=0.3)
    figure.suptitle(title)
    report.save_figure(path, figure)
