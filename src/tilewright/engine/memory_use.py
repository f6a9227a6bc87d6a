"""What the memory of an engine goes to, as far as it is known, and what the process holds in all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes; with several ranks, those of the first."""

    weight_bytes: int
    kv_bytes: int  # of all pages of keys and values, of which untouched ones take no memory
    kv_bytes_used: int  # of pages that running answers hold
    scratch_bytes: int  # for results of ops
    resident_bytes: int  # of the process; 0 where the system does not tell


def resident_bytes() -> int:
    """What this process has in memory, pages it shares with others included; 0 where the system does not tell."""
    try:
        found = re.search(r"^Rss:\s+(\d+) kB", _ROLLUP.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
