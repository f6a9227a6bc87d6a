"""Tables, JSON and plots of benchmarks, the machine's limits, and checks that all benchmarks share."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.host import files
from tilewright.types import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tilewright.bench.timing import Times


def size(text: str) -> tuple[int, int]:
    """Return width and height of a flag such as 1024x768."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, expected one such as 1024x768")
    return int(match[1]), int(match[2])


def check_outputs(options: argparse.Namespace) -> None:
    """Raise RequestError if the files of --json and --plot cannot be written, before anything is measured."""
    if options.json:
        files.check_output(options.json, "--json")
    if not options.plot:
        return
    files.check_output(options.plot, "--plot")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError("--plot needs matplotlib: pip install matplotlib") from None
    formats = Figure().canvas.get_supported_filetypes()
    if _plot_format(options.plot) not in formats:
        raise RequestError(f"--plot is {options.plot}, expected a name that ends in .{', .'.join(sorted(formats))}")


def save_figure(path: Path, figure: Figure) -> None:
    """Write the figure in the format of the file's suffix, PNG without one."""
    data = io.BytesIO()
    figure.savefig(data, format=_plot_format(path), dpi=130)
    files.write_bytes(path, data.getvalue())


def _plot_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower() or "png"


def load_average() -> float:
    """Return the load average of the last minute; warn if other processes use too much of the machine."""
    load = os.getloadavg()[0]
    if load > 0.5 * (os.cpu_count() or 1):
        print(f"tilewright: the load average is {load:.1f}: other programs distort the figures", file=sys.stderr)
    return load


def versions() -> dict[str, str]:
    import torch

    from tilewright import __version__

    return {"tilewright": __version__, "torch": torch.__version__, "python": platform.python_version()}


FAILED = "FAILED CHECK"


@dataclass(frozen=True)
class MachineLimits:
    """The machine's limits, measured in the same run."""

    read_gb_s: float
    bf16_tflops: float

    def seconds(self, bytes_moved: int, flops: int) -> float:
        """Return the minimum time of any kernel on this machine."""
        return max(bytes_moved / (self.read_gb_s * 1e9), flops / (self.bf16_tflops * 1e12))


@dataclass(frozen=True)
class BenchResult:
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
        """The time of torch divided by that of the kernel."""
        return self.times.torch_s / self.times.ours_s if self.times else math.nan

    @property
    def of_limit(self) -> float:
        """The share of the machine's limit that the kernel reaches."""
        return self.limit_s / self.times.ours_s if self.times else math.nan


@dataclass(frozen=True)
class GroupMean:
    """Geometric means over a group of rows."""

    group: str
    num_rows: int
    speedup: float
    of_limit: float


def means(results: Sequence[BenchResult]) -> list[GroupMean]:
    """Return the means of each group, in order of appearance, without rows that failed their check."""
    groups: dict[str, list[BenchResult]] = {}
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


def as_table(results: Sequence[BenchResult], limits: MachineLimits, torch_dtypes: Mapping[str, str]) -> str:
    """Return the rows as a table, followed by the groups' means; `torch_dtypes` by kind of product."""
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


def _cells(result: BenchResult) -> tuple[str, ...]:
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
    """Return the lines with aligned columns: those of `left` to the left, the others to the right."""
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


def write_json(path: Path, results: Sequence[BenchResult], about: dict[str, object]) -> None:
    """Write the rows and their means, and `about`: the machine and its limits."""
    rows = [asdict(r) | {"speedup": _number(r.speedup), "of_limit": _number(r.of_limit)} for r in results]
    write_document(path, about | {"rows": rows, "geometric_means": [asdict(mean) for mean in means(results)]})


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_plot(path: Path, results: Sequence[BenchResult], limits: MachineLimits) -> None:
    """Plot a roofline: the speeds of kernels and torch over arithmetic intensity, under the machine's limits."""
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
    save_figure(path, figure)
