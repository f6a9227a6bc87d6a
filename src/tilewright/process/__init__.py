"""The one way to start, frame, supervise, confine and end a child process.

    child.py       starts one with a channel, CPUs and a log of its own, calls its entry, and ends it
    frames.py      messages over a channel: JSON and bytes, within a bound
    log.py         where a process logs, and in what form
    supervisor.py  restarts one that ended, with growing pauses, and tells whether it is ready
    workers.py     several that need each other: the death of one ends all
    confine.py     limits of memory and time, and a filter of system calls, for one that reads what clients send
    state.py       what the system says of one: stopped, busy, how it ended

Here is the event loop of those that speak HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """What `main` returns, by uvloop where there is one: it takes less of the machine, which the engine needs."""
    try:
        import uvloop
    except ImportError:  # not made for every system
        return asyncio.run(main)
    return uvloop.run(main)
