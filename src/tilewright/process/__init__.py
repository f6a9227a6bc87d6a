"""Starts, supervises, confines and ends child processes, and frames their messages.

    child.py       starts a process with a channel, CPUs and a log, calls its entry, and ends it
    frames.py      messages over a channel: JSON and bytes, within a bound
    log.py         the format and level of a process's log
    supervisor.py  restarts a process that ended, with growing pauses
    workers.py     runs processes that need each other: the death of one ends all
    confine.py     limits memory, time and system calls of a process that reads clients' data
    state.py       reads the state of a process: stopped, busy, how it ended

`run_loop` runs the event loop of processes that serve HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its result, with uvloop if it is installed: it leaves more CPU time to the engine."""
    try:
        import uvloop
    except ImportError:  # not available for every system
        return asyncio.run(main)
    return uvloop.run(main)
