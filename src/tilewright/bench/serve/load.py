"""When requests are sent: a fixed number at once (closed loop), or at random times (open loop)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tilewright.bench.http_client import Client
from tilewright.bench.serve.sample import send_request
from tilewright.bench.serve.workload import Request

SendOne = Callable[[Request], Awaitable[Any]]  # a Sample, or an ImageSample
Send = Callable[[Client, str, Request, float, float, Callable[[], float]], Awaitable[Any]]


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` requests at once; each answer starts the next. None starts after `seconds`."""

    concurrency: int
    seconds: float | None = None

    async def send(self, requests: Sequence[Request], send_one: SendOne, clock: Callable[[], float]) -> list[Any]:
        samples: list[Any] = []
        waiting = iter(requests)
        end_s = float("inf") if self.seconds is None else clock() + self.seconds

        async def worker() -> None:
            for request in waiting:
                samples.append(await send_one(request))
                if clock() >= end_s:
                    return

        await asyncio.gather(*(worker() for _ in range(min(self.concurrency, len(requests)))))
        return samples


@dataclass(frozen=True)
class OpenLoop:
    """Each request at its own time, however many are under way."""

    due_s: tuple[float, ...]  # after the start, ascending

    async def send(self, requests: Sequence[Request], send_one: SendOne, clock: Callable[[], float]) -> list[Any]:
        begin_s = clock()
        tasks = []
        for request, due_s in zip(requests, self.due_s, strict=True):
            await asyncio.sleep(begin_s + due_s - clock())
            tasks.append(asyncio.ensure_future(send_one(request)))
        return list(await asyncio.gather(*tasks))


def arrivals(
    rate: float, burstiness: float, seed: int, count: int | None = None, seconds: float | None = None
) -> tuple[float, ...]:
    """Times of `count` arrivals, or of those within `seconds`, at `rate` a second.

    Gaps are gamma distributed with the shape `burstiness`: 1 is a Poisson process, below it bursty, above it even.
    """
    chance = random.Random(f"{seed} arrivals")
    times: list[float] = []
    at_s = 0.0
    while (count is None or len(times) < count) and (seconds is None or at_s < seconds):
        times.append(at_s)
        at_s += chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return tuple(times)


async def run(
    client: Client,
    path: str,
    requests: Sequence[Request],
    pace: ClosedLoop | OpenLoop,
    timeout_s: float,
    on_sample: Callable[[Any], None] = lambda sample: None,
    clock: Callable[[], float] = perf_counter,
    send: Send = send_request,
) -> list[Any]:
    """The samples of all requests that were sent, in the order of their numbers."""
    began_s = clock()

    async def ask_and_tell(request: Request) -> Any:
        sample = await send(client, path, request, timeout_s, began_s, clock)
        on_sample(sample)
        return sample

    return sorted(await pace.send(requests, ask_and_tell, clock), key=lambda sample: sample.number)
