"""What the memory of an engine goes to, as far as it is known, and what the process holds in all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes; with several ranks, those of the first."""

    weight_bytes: int  # as they are packed
    mapped_weight_bytes: int  # of these, pages of the pack cache's file, which all processes that map it share
    kv_bytes: int  # of all pages of keys and values, of which untouched ones take no memory
    kv_bytes_used: int  # of pages that running answers hold
    kv_bytes_touched: int  # of pages that were written so far: those, and what the prefix cache keeps
    scratch_bytes: int  # for results of ops
    feature_bytes: int  # cached features of media
    resident_bytes: int  # of the process; 0 where the system does not tell
    resident_file_bytes: int  # of these, pages of files: libraries and mapped weights

    @property
    def other_bytes(self) -> int:
        """Resident, and none of the above: Python, torch and its libraries, the tokenizer, buffers of steps."""
        known = self.weight_bytes + self.kv_bytes_touched + self.scratch_bytes + self.feature_bytes
        return max(0, self.resident_bytes - known)

    def as_text(self) -> str:
        """A line for each part, for people to read."""
        rows = [
            ("weights, packed", self.weight_bytes),
            ("  of these mapped from the pack cache", self.mapped_weight_bytes),
            ("keys and values, room for", self.kv_bytes),
            ("  held by running answers", self.kv_bytes_used),
            ("  written so far, prefix cache included", self.kv_bytes_touched),
            ("results of ops within a step", self.scratch_bytes),
            ("features of media", self.feature_bytes),
            ("other", self.other_bytes),
            ("resident in all", self.resident_bytes),
            ("  of these pages of files", self.resident_file_bytes),
        ]
        return "\n".join(f"{name:42} {size / 2**20:10.1f} MiB" for name, size in rows)


class Resident(NamedTuple):
    """What a process has in memory, in bytes."""

    total: int = 0
    file: int = 0  # pages of files, shared with others or not


def resident() -> Resident:
    """Of this process; nothing where the system does not tell."""
    try:
        text = _ROLLUP.read_text()
    except OSError:
        return Resident()
    found = {name: int(size) * 1024 for name, size in re.findall(r"^(Rss|Anonymous):\s+(\d+) kB", text, re.MULTILINE)}
    total = found.get("Rss", 0)
    return Resident(total, total - found.get("Anonymous", total))
