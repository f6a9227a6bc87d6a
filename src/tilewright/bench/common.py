"""Flags and checks that all benchmarks share. Imports no torch."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys


def size(text: str) -> tuple[int, int]:
    """Width and height of a flag such as 1024x768."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected such as 1024x768")
    return int(match[1]), int(match[2])


def can_plot() -> bool:
    """Whether matplotlib is installed; prints how to install it if not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("tilewright: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return False
    return True


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
