"""Results of the kernel benchmark as a table, JSON and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import files
from tilewright.bench import common

if TYPE_CHECKING:  # timing imports torch, which tables do not need
    from tilewright.bench.timing import Times

FAILED = "FAILED CHECK"


@dataclass(frozen=True)
class MachineLimits:
    """The machine's limits, measured in the same run."""

    read_gb_s: float
    bf16_tflops: float

    def seconds(self, bytes_moved: int, flops: int) -> float:
        """The minimum time of any kernel on this machine."""
        return max(bytes_moved / (self.read_gb_s * 1e9), flops / (self.bf16_tflops * 1e12))


@dataclass(frozen=True)
class Result:
    """The measurement of one row."""

    name: str
    shape: str
    group: str
    bytes_moved: int
    flops: int
    limit_s: float
    times: Times | None  # None: the check failed

    @property
    def speedup(self) -> float:
        """torch's time divided by ours."""
        return self.times.torch_s / self.times.ours_s if self.times else math.nan

    @property
    def of_limit(self) -> float:
        """The share of the machine's limit that our kernel reaches."""
        return self.limit_s / self.times.ours_s if self.times else math.nan


@dataclass(frozen=True)
class GroupMean:
    """Geometric means over a group of rows."""

    group: str
    num_rows: int
    speedup: float
    of_limit: float


def means(results: Sequence[Result]) -> list[GroupMean]:
    """The means of each group, in the order the groups came; a row that failed its check is left out."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.group and result.times:
            groups.setdefault(result.group, []).append(result)
    return [
        GroupMean(
            group,
            len(rows),
            math.exp(sum(math.log(r.speedup) for r in rows) / len(rows)),
            math.exp(sum(math.log(r.of_limit) for r in rows) / len(rows)),
        )
        for group, rows in groups.items()
    ]


def as_table(results: Sequence[Result], limits: MachineLimits, torch_dtypes: Mapping[str, str]) -> str:
    """The rows for people to read, the means of the groups below them; `torch_dtypes` by kind of product."""
    head = ("kernel", "shape", "ours us", "torch us", "x torch", "GB/s", "TFLOP/s", "of limit")
    lines = [head, *(_cells(result) for result in results)]
    text = aligned(lines, left=(0, 1))
    group_means = [
        f"{m.group}: {m.speedup:.2f} x torch, {m.of_limit:.0%} of the limit, {m.num_rows} rows (geometric means)"
        for m in means(results)
    ]
    text += ["", *group_means] if group_means else []
    limits_line = (
        f"limits: read {limits.read_gb_s:.1f} GB/s, bf16 {limits.bf16_tflops:.2f} TFLOP/s, measured in this run"
    )
    torch_line = (
        f"torch multiplies matrices in {torch_dtypes['matrix']} and by a vector in {torch_dtypes['vector']}, "
        "the faster of bfloat16 and float32 here"
    )
    text += ["", limits_line, torch_line]
    return "\n".join(text)


def _cells(result: Result) -> tuple[str, ...]:
    times = result.times
    if times is None:
        return (result.name, result.shape, FAILED, "", "", "", "", "")
    return (
        result.name,
        result.shape,
        f"{times.ours_s * 1e6:.1f}",
        f"{times.torch_s * 1e6:.1f}",
        f"{result.speedup:.2f}",
        f"{result.bytes_moved / times.ours_s / 1e9:.1f}",
        f"{result.flops / times.ours_s / 1e12:.3f}",
        f"{result.of_limit:.0%}",
    )


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The lines with aligned columns: those in `left` to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def write_document(path: Path, document: dict[str, object]) -> None:
    files.write_bytes(path, (json.dumps(document, indent=2) + "\n").encode())


def write_json(path: Path, results: Sequence[Result], about: dict[str, object]) -> None:
    """The rows and their means beside what the machine is and what it reached."""
    rows = [asdict(r) | {"speedup": _number(r.speedup), "of_limit": _number(r.of_limit)} for r in results]
    write_document(path, about | {"rows": rows, "geometric_means": [asdict(mean) for mean in means(results)]})


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_plot(path: Path, results: Sequence[Result], limits: MachineLimits) -> None:
    """A roofline: speed over arithmetic intensity, ours and torch's, under what the machine allows."""
    from matplotlib.figure import Figure  # imported here: only plots need it

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.add_subplot()
    drawn = [(r, r.times) for r in results if r.times and r.flops]
    intensities = [r.flops / r.bytes_moved for r, _ in drawn] or [1.0]
    ridge = limits.bf16_tflops * 1e12 / (limits.read_gb_s * 1e9)
    roof = sorted([min(intensities) / 2, ridge, max([*intensities, ridge]) * 2])
    axes.plot(
        roof,
        [min(x * limits.read_gb_s * 1e9, limits.bf16_tflops * 1e12) / 1e9 for x in roof],
        color="black",
        label=f"machine: {limits.read_gb_s:.1f} GB/s, {limits.bf16_tflops:.2f} TFLOP/s bf16",
    )
    families = list(dict.fromkeys(r.name for r, _ in drawn))
    for number, name in enumerate(families):
        rows = [(r, times) for r, times in drawn if r.name == name]
        x = [r.flops / r.bytes_moved for r, _ in rows]
        color = f"C{number % 10}"
        axes.scatter(x, [r.flops / times.ours_s / 1e9 for r, times in rows], s=28, color=color, label=name)
        axes.scatter(x, [r.flops / times.torch_s / 1e9 for r, times in rows], s=24, color=color, marker="x")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="flops per byte",
        ylabel="GFLOP/s",
        title="Kernels (dots) and torch (crosses) under the machine's limits",
    )
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    common.write_plot(path, figure)
