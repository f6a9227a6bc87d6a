"""Flags and checks that all benchmarks share. Imports no torch."""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import files
from tilewright.types import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def size(text: str) -> tuple[int, int]:
    """Width and height of a flag such as 1024x768."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected such as 1024x768")
    return int(match[1]), int(match[2])


def check_outputs(options: argparse.Namespace) -> None:
    """RequestError if the files of --json and --plot could not be written, before anything is measured."""
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


def write_plot(path: Path, figure: Figure) -> None:
    """The figure as a file of the format that its name ends in, PNG where it has no ending."""
    data = io.BytesIO()
    figure.savefig(data, format=_plot_format(path), dpi=130)
    files.write_bytes(path, data.getvalue())


def _plot_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower() or "png"


def load_average() -> float:
    """The load average of the last minute; warns if other processes use too much of the machine."""
    load = os.getloadavg()[0]
    if load > 0.5 * (os.cpu_count() or 1):
        print(
            f"tilewright: the load average is {load:.1f}: others are running, the figures will suffer", file=sys.stderr
        )
    return load


def versions() -> dict[str, str]:
    import torch

    from tilewright import __version__

    return {"tilewright": __version__, "torch": torch.__version__, "python": platform.python_version()}
