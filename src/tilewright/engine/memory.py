"""How much memory there is for keys and values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from tilewright.types import RequestError

# Of what is free once the weights are loaded; the rest is for activations, pictures and other programs.
KV_SHARE = 0.5
# Of that, for encoder states: a picture of Llama-3.2-Vision takes as much as 1,600 tokens of text.
SCENE_SHARE = 0.25
# Of that, for states of recurrent layers. One of Qwen3.5 takes as much as 1,500 to 2,300 tokens of text, and an answer
# needs three or so, two of them snapshots: with some 6,000 tokens each, pages and slots run out together.
STATE_SHARE = 0.5
# One to go on from and seven to come back to are as many as an answer can have use of.
SLOTS_PER_SEQUENCE = 8

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(size: int | str) -> int:
    """The bytes that 2000000000, "2GB" or "1.5 GiB" mean."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", size.lower())
    if not match or match[2] == "i":
        raise RequestError(f"memory size is {size!r}, expected bytes or a size such as 2GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


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
    """(limit, used) of the control group and those around it, in the files of either version, where it has a limit.

    A service's limit is that of its own group; in a container the own group is shown as the root.
    """
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current")
        root = GROUPS
        if number != "0":
            if "memory" not in controllers.split(","):
                continue
            names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes"), GROUPS / "memory"
        group = Path(path)
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                limit, used = (Path(f"{root}{folder}", name).read_text().strip() for name in names)
                if limit.isdecimal() and used.isdecimal():
                    yield int(limit), int(used)


def kv_bytes(kv_memory: int | str | None) -> int:
    """What `kv_memory` says, or a share of the free memory."""
    return int(available_bytes() * KV_SHARE) if kv_memory is None else parse_bytes(kv_memory)


def num_scene_pages(page_bytes: int, pages_per_medium: int, max_media: int, size_bytes: int) -> int:
    """Pages for encoder states: a share of `size_bytes`, at least one medium's, no more than could be seen at once."""
    if page_bytes * pages_per_medium >= size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected more than the {page_bytes * pages_per_medium} that the encoder "
            "states of one image take"
        )
    pages = int(size_bytes * SCENE_SHARE // page_bytes)
    return min(max(pages, pages_per_medium), pages_per_medium * max_media)


def num_state_slots(slot_bytes: int, page_bytes: int, max_slots: int, size_bytes: int) -> int:
    """Slots for states of recurrent layers: a share of `size_bytes`, at least one, no more than are of use."""
    if slot_bytes + page_bytes > size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected at least {slot_bytes + page_bytes}: the recurrent state of one "
            f"sequence takes {slot_bytes}, a page of keys and values {page_bytes}"
        )
    return min(max(int(size_bytes * STATE_SHARE // slot_bytes), 1), max_slots)


def num_kv_pages(page_bytes: int, max_pages: int, size_bytes: int) -> int:
    """Pages that fit `size_bytes`; no more than could ever be used."""
    pages = size_bytes // page_bytes
    if pages < 1:
        raise RequestError(f"kv_memory is {size_bytes} bytes, expected at least one page of {page_bytes}")
    return min(pages, max_pages)
