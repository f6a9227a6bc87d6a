"""Runs requests against a server: a fixed number at once (closed loop), or at random times (open loop)."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from tqdm import tqdm

from tilewright.bench.http_client import Client, HttpError
from tilewright.bench.serve.sample import StreamError, check, send_request
from tilewright.bench.serve.workload import WorkloadRequest
from tilewright.types import RequestError


def is_here(host: str, port: int) -> bool:
    """Return whether the server's address is one of this machine's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def measure_limits() -> dict[str, Any]:
    """Return the machine's description ("machine") and a new Probe's figures ("probe"), in a few seconds."""
    command = [sys.executable, "-m", "tilewright.bench.serve.run"]
    result = subprocess.run(command, stdout=subprocess.PIPE)  # standard error is passed through
    if result.returncode:
        raise RequestError("this machine could not be measured; --no-limits skips that")
    return json.loads(result.stdout)


def _main() -> None:
    from dataclasses import asdict

    from tilewright.bench.timing import probe
    from tilewright.engine.measure import machine

    print(json.dumps({"machine": machine.as_dict(machine.describe()), "probe": asdict(probe())}))


if __name__ == "__main__":
    _main()


SendOne = Callable[[WorkloadRequest], Awaitable[Any]]  # a Sample, or an ImageSample
Send = Callable[[Client, str, WorkloadRequest, float, float, Callable[[], float]], Awaitable[Any]]


@dataclass(frozen=True)
class ClosedLoop:
    """A load of `concurrency` requests at once; each answer starts the next request, until `seconds`."""

    concurrency: int
    seconds: float | None = None

    async def send(
        self, requests: Sequence[WorkloadRequest], send_one: SendOne, clock: Callable[[], float]
    ) -> list[Any]:
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
    """A load of requests at given times, regardless of answers."""

    due_s: tuple[float, ...]  # after the start, ascending

    async def send(
        self, requests: Sequence[WorkloadRequest], send_one: SendOne, clock: Callable[[], float]
    ) -> list[Any]:
        begin_s = clock()
        tasks = []
        for request, due_s in zip(requests, self.due_s, strict=True):
            await asyncio.sleep(begin_s + due_s - clock())
            tasks.append(asyncio.ensure_future(send_one(request)))
        return list(await asyncio.gather(*tasks))


def arrivals(
    rate: float, burstiness: float, seed: int, count: int | None = None, seconds: float | None = None
) -> tuple[float, ...]:
    """Return the times of `count` arrivals, or of all within `seconds`, at `rate` per second.

    Gaps are gamma-distributed with the shape `burstiness`: 1 is a Poisson process, less is bursty, more is even.
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
    requests: Sequence[WorkloadRequest],
    pace: ClosedLoop | OpenLoop,
    timeout_s: float,
    on_sample: Callable[[Any], None] = lambda sample: None,
    clock: Callable[[], float] = perf_counter,
    send: Send = send_request,
) -> list[Any]:
    """Send requests at the given pace; return the samples of those sent, in the order of their numbers."""
    began_s = clock()

    async def send_and_report(request: WorkloadRequest) -> Any:
        sample = await send(client, path, request, timeout_s, began_s, clock)
        on_sample(sample)
        return sample

    return sorted(await pace.send(requests, send_and_report, clock), key=lambda sample: sample.number)


MAX_MODELS_BYTES = 1 << 24


@dataclass(frozen=True)
class ServerMeasurement:
    """The samples of a run, and the share of a CPU that this process used."""

    samples: list[Any]  # of type Sample, or ImageSample
    client_cpu_share: float


async def first_model(client: Client, *modalities: str) -> str:
    """Return the first model with the first of these output modalities, else the next, else the first model.

    Raise RequestError if the server names none.
    """
    try:
        async with client.request("GET", "/v1/models") as response:
            await check(response)
            body = await response.read(MAX_MODELS_BYTES)
    except StreamError as error:
        raise RequestError(f"{client.server.url}/v1/models answers {error.kind}: {error}") from error
    except HttpError as error:
        raise RequestError(str(error)) from error
    finally:
        client.close()  # connections belong to this event loop
    try:
        models = json.loads(body)["data"]
        for modality in modalities:
            if fitting := [model for model in models if modality in (model.get("output_modalities") or ())]:
                return str(fitting[0]["id"])
        return str(models[0]["id"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{client.server.url}/v1/models names no model: use --model") from None


async def measure(
    client: Client,
    path: str,
    warmup: Sequence[WorkloadRequest],
    requests: Sequence[WorkloadRequest],
    pace: ClosedLoop | OpenLoop,
    timeout_s: float,
    send: Send = send_request,
) -> ServerMeasurement:
    """Send the warm-up, then the measured requests, with a progress bar on standard error."""
    concurrency = pace.concurrency if isinstance(pace, ClosedLoop) else 1
    try:
        await _send(client, path, warmup, ClosedLoop(concurrency), timeout_s, "warming up", send)
        cpu_s, begin_s = process_time(), perf_counter()
        samples = await _send(client, path, requests, pace, timeout_s, "measuring", send)
        return ServerMeasurement(samples, (process_time() - cpu_s) / (perf_counter() - begin_s))
    finally:
        client.close()


async def _send(
    client: Client,
    path: str,
    requests: Sequence[WorkloadRequest],
    pace: ClosedLoop | OpenLoop,
    timeout_s: float,
    what: str,
    send: Send,
) -> list[Any]:
    is_quiet = not sys.stderr.isatty()
    with tqdm(total=len(requests), desc=what, file=sys.stderr, leave=False, disable=is_quiet) as bar:
        return await run(client, path, requests, pace, timeout_s, lambda sample: bar.update(), send=send)
