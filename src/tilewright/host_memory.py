"""Sizes of memory: as people write them, and as the machine and its control group have them."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tilewright import control_group
from tilewright.types import RequestError

# Linux's flag of mmap, which Python names only from 3.13 on. Without it the kernel counts a whole mapping against the
# memory that may be promised, and refuses one larger than the machine's.
MAP_NORESERVE = 0x4000

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(size: int | str) -> int:
    """The bytes that 2000000000, "2GB" or "1.5 GiB" mean."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", size.lower())
    if not match or match[2] == "i":
        raise RequestError(f"memory size is {size!r}, expected bytes or a size such as 2GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def shared_file(name: str) -> int:
    """The descriptor of an empty file in memory, without a name: it goes with the last process that has it."""
    try:
        return os.memfd_create(f"tilewright_{name}", os.MFD_CLOEXEC)
    except OSError:  # a system that refuses the call: a file that has no name either
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def trim_heap() -> None:
    """Gives freed blocks back to the system: glibc keeps those under 32 MB, and 100 MB of them gather in a load."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such call
    if trim is not None:
        trim(0)


def total_bytes() -> int:
    """The memory of the machine, or of its control group where that is less."""
    return min([_system_bytes("MemTotal"), *(limit for limit, _ in _group_bytes())])


def available_bytes() -> int:
    """What this process may still take: free memory of the machine, or of its control group where that is less."""
    return min([_system_bytes("MemAvailable"), *(limit - used for limit, used in _group_bytes())])


def _system_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _group_bytes() -> Iterator[tuple[int, int]]:
    """(limit, used) of the control group and those around it, where it has a limit."""
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for limit, used in control_group.values_of("memory", *files):
        if limit.isdecimal() and used.isdecimal():
            yield int(limit), int(used)
