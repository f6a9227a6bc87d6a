"""What all benchmarks say of themselves, and check before minutes of measuring. Imports no torch."""

from __future__ import annotations

import os
import platform
import sys


def can_plot() -> bool:
    """Whether there is matplotlib; says so where there is not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("tilewright: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return False
    return True


def load_average() -> float:
    """Runnable threads in the last minute; warns where they leave too little of the machine."""
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
