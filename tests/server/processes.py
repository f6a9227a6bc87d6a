"""Processes of a server that runs, and their memory."""

import os
from pathlib import Path


def family_of(pid):
    """A process and all below it."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def memory_bytes(pid):
    """What is resident of a process; nothing of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.split("VmRSS:")[1].split()[0]) * 1024 if "VmRSS:" in text else 0
