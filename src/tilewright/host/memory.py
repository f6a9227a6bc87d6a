"""Parses sizes of memory, and reads the memory limits of the machine, its control groups and this process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright import config
from tilewright.host import topology
from tilewright.types import RequestError

# Linux's flag of mmap, which Python names from 3.13 on. Without it the kernel counts a whole mapping against committed
# memory, and refuses a mapping larger than the machine's memory.
MAP_NORESERVE = 0x4000

# Needs of a process with a model of 20M parameters on two threads: addresses, of which libraries reserve far more than
# they use (below 1.4 GB one of them fails, or hangs), and memory.
START_ADDRESSES = 1_500_000_000
START_BYTES = 320_000_000
ADDRESSES, DATA = "ulimit -v", "ulimit -d"  # names of limits
STACK_BYTES = 8 << 20  # addresses of a thread's stack
SPARE_BYTES = 200_000_000  # in addition to weights: threads, a step's activations and the smallest KV cache

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(size: int | str) -> int:
    """Return the number of bytes of a size such as 2000000000, "2GB" or "1.5 GiB"."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", size.lower())
    if not match or match[2] == "i":
        raise RequestError(f"memory size is {size!r}, expected bytes or a size such as 2GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def shared_file(name: str) -> int:
    """Return the descriptor of an empty, unnamed file in memory, which is freed with the last process that has it."""
    try:
        return os.memfd_create(f"tilewright_{name}", os.MFD_CLOEXEC)
    except OSError:  # a system that refuses the call: use an unnamed file on disk
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def trim_heap() -> None:
    """Return freed blocks to the system: glibc keeps those under 32 MB, which add up to 100 MB during loading."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries do not have it
    if trim is not None:
        trim(0)


def total_bytes() -> int:
    """Return the memory that this process may have: the least of the machine's, its control groups' and `ulimit`'s."""
    return min(
        [_system_bytes("MemTotal"), *(limit for limit, _ in _group_bytes()), *(one.size_bytes for one in own_limits())]
    )


def available_bytes() -> int:
    """Return the memory that this process may still allocate, by the machine, its control groups and `ulimit`."""
    group = (limit - used for limit, used in _group_bytes())
    own = (one.size_bytes - one.used_bytes for one in own_limits())
    return max(min([_system_bytes("MemAvailable"), *group, *own]), 0)


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process, and the memory that counts against it."""

    name: str  # for errors
    size_bytes: int
    used_bytes: int

    def __str__(self) -> str:
        return f"{size_text(self.size_bytes)} ({self.name})"


def own_limits() -> list[MemoryLimit]:
    """Return the limits of this process alone, on its address space and its data."""
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    found = []
    for name, which, num_pages in ((ADDRESSES, resource.RLIMIT_AS, pages[0]), (DATA, resource.RLIMIT_DATA, pages[5])):
        size_bytes = resource.getrlimit(which)[0]
        if size_bytes != resource.RLIM_INFINITY:
            found.append(MemoryLimit(name, size_bytes, num_pages * resource.getpagesize()))
    return found


def shared_limits() -> list[MemoryLimit]:
    """Return the limits of control groups and of the machine, each with the swap space added."""
    swap_bytes = _system_bytes("SwapTotal")
    used_bytes = _system_bytes("RssAnon", Path("/proc/self/status"))
    sizes = [("its control group", limit) for limit, _ in _group_bytes()] + [("the machine", _system_bytes("MemTotal"))]
    return [MemoryLimit(name, size_bytes + swap_bytes, used_bytes) for name, size_bytes in sizes]


def require_start(what: str) -> None:
    """Raise RequestError if torch, the kernels and their threads do not fit into the memory limits of this process.

    Checked before they are loaded: each library fails in its own way when memory runs out during loading.
    """
    stacks_bytes = config.current().team_size * STACK_BYTES
    own_bytes = {ADDRESSES: START_ADDRESSES + stacks_bytes, DATA: START_BYTES + stacks_bytes}
    for limit in (*own_limits(), *shared_limits()):
        needed_bytes = own_bytes.get(limit.name, START_BYTES)
        if needed_bytes > limit.size_bytes:
            raise _too_small(what, needed_bytes, limit)


def require_room(what: str, num_bytes: int) -> None:
    """Raise RequestError if `what`, with `num_bytes` more, does not fit into the memory limits of this process."""
    for limit in (*own_limits(), *shared_limits()):
        needed_bytes = limit.used_bytes + num_bytes + SPARE_BYTES
        if needed_bytes > limit.size_bytes:
            raise _too_small(what, needed_bytes, limit)


def _too_small(what: str, needed_bytes: int, limit: MemoryLimit) -> RequestError:
    return RequestError(f"{what} needs about {size_text(needed_bytes)} of memory, and this process may have {limit}")


@contextlib.contextmanager
def explained_shortage(what: str) -> Iterator[None]:
    """Replace errors in the block that mean a lack of memory by a RequestError with the limits."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not _is_shortage(error):
            raise
        raise RequestError(f"{what}: {shortage_text()}") from error


def shortage_text() -> str:
    """Return the end of a sentence about a process that ran out of memory."""
    return f"there is not enough memory, and this process may have {smallest_limit()}"


def smallest_limit() -> MemoryLimit:
    """Return the smallest limit of this process."""
    return min([*own_limits(), *shared_limits()], key=lambda limit: limit.size_bytes)


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Messages of torch, the dynamic linker and Python. Without limits, threads are refused for other reasons.
    text = str(error)
    no_memory = ("can't allocate memory", "failed to map segment", "annot allocate memory", "read lock")
    return any(part in text for part in no_memory) or ("can't start new thread" in text and bool(own_limits()))


def size_text(num_bytes: int) -> str:
    """Return a size as text: "450 MB", "1.5 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 950_000_000 else f"{num_bytes / 1e6:.0f} MB"


def _system_bytes(name: str, file: Path = Path("/proc/meminfo")) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", file.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _group_bytes() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of the control group and its parents that have a limit."""
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for limit, used in topology.values_of("memory", *files):
        if limit.isdecimal() and used.isdecimal():
            yield int(limit), int(used)
