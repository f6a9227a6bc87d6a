"""The processes of a server: one way to spawn, supervise and end them, and the event loop of those that speak HTTP."""

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
