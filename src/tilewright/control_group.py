"""What the control group of this process says: files of cgroup version 1 or 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def values_of(controller: str, files: tuple[str, ...], old_files: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The texts of a controller's files in the own group and those around it, where a group has them all.

    `files` are their names in version 2, `old_files` in version 1. A service's limit is that of its own group; in a
    container the own group is shown as the root.
    """
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        names, root = files, GROUPS
        if number != "0":
            if controller not in controllers.split(","):
                continue
            names, root = old_files, GROUPS / controller
        group = Path(path)
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                yield tuple(Path(f"{root}{folder}", name).read_text().strip() for name in names)


def cpu_quota() -> float | None:
    """The CPUs' time per time that the process may use, such as 3.5 on any of 64 CPUs; None: all of it."""
    quotas = []
    for texts in values_of("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        quota, period = " ".join(texts).split()  # cpu.max has both in one line; no limit is "max" there, before it -1
        if quota.isdecimal() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
