"""The rounds of a model's benchmark as a table, JSON and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tilewright.bench import common
from tilewright.bench.probe import Probe, median
from tilewright.bench.report import aligned, write_document
from tilewright.bench.rounds import Round


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, object]]:
    """Median, minimum and maximum of each value over the rounds."""
    found: dict[str, dict[str, object]] = {}
    for name, amount in rounds[0].amounts.items():
        values = [one.amounts[name].value for one in rounds]
        found[name] = {
            "unit": amount.unit,
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
    return found


def limits(rounds: Sequence[Round]) -> Probe:
    return median([one.probe for one in rounds])


def as_table(rounds: Sequence[Round]) -> str:
    """The values as a table, with the machine's speed during the rounds."""
    lines = [("", "median", "min", "max", "unit")]
    for name, entry in summary(rounds).items():
        numbers = (f"{entry[key]:.4g}" for key in ("median", "min", "max"))
        lines.append((name, *numbers, str(entry["unit"])))  # type: ignore[arg-type]
    machine = limits(rounds)
    return "\n".join(
        [
            *aligned(lines, left=(0, 4)),
            "",
            f"the machine between the rounds, medians: read {machine.read_gb_s:.1f} GB/s "
            f"at best, {machine.read_gb_s_median:.1f} as a rule, "
            f"matrix product {machine.gemm_tflops:.2f} TFLOP/s ({machine.gemm_dtype}), "
            f"multiply peak {machine.peak_tflops:.2f} TFLOP/s",
        ]
    )


def write_json(path: Path, rounds: Sequence[Round], about: dict[str, object]) -> None:
    """The measurements, the machine and its limits."""
    document = {
        "figures": summary(rounds),
        "limits": asdict(limits(rounds)),
        "rounds": [asdict(one) for one in rounds],
    }
    write_document(path, about | document)


def write_plot(path: Path, rounds: Sequence[Round], title: str) -> None:
    """A panel for each value: its rounds as dots, their median as a line."""
    from matplotlib.figure import Figure  # imported here: only plots need it

    entries = summary(rounds)
    figure = Figure(figsize=(3.4 * len(entries), 3.6), layout="constrained")
    for axes, (name, entry) in zip(figure.subplots(1, len(entries), squeeze=False)[0], entries.items(), strict=True):
        values = [one.amounts[name].value for one in rounds]
        axes.plot(range(1, len(values) + 1), values, "o")
        axes.axhline(entry["median"], color="black", linewidth=1)
        axes.set(title=name, xlabel="round", ylabel=entry["unit"])
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
    figure.suptitle(title)
    common.write_plot(path, figure)
