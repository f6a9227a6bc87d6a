"""A run against a server, from the query of its models to the last answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from tqdm import tqdm

from tilewright.bench.http_client import Client
from tilewright.bench.http_errors import HttpError
from tilewright.bench.serve import load
from tilewright.bench.serve.sample import StreamError, check, send_request
from tilewright.bench.serve.workload import Request
from tilewright.types import RequestError

MAX_MODELS_BYTES = 1 << 24


@dataclass(frozen=True)
class Measured:
    """The samples, and the share of a CPU that this process used."""

    samples: list[Any]  # of type Sample, or ImageSample
    client_cpu_share: float


async def first_model(client: Client, *modalities: str) -> str:
    """The name of the first model that gives the first of these, or else the next; the first of all if none does.

    RequestError if the server names none.
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
        client.close()  # its connections belong to this event loop
    try:
        models = json.loads(body)["data"]
        for modality in modalities:
            if fitting := [model for model in models if modality in (model.get("output_modalities") or ())]:
                return str(fitting[0]["id"])
        return str(models[0]["id"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"{client.server.url}/v1/models names no model: give --model") from None


async def measure(
    client: Client,
    path: str,
    warmup: Sequence[Request],
    requests: Sequence[Request],
    pace: load.ClosedLoop | load.OpenLoop,
    timeout_s: float,
    send: load.Send = send_request,
) -> Measured:
    """Sends the warm-up, then the measured requests, with a progress bar on standard error."""
    concurrency = pace.concurrency if isinstance(pace, load.ClosedLoop) else 1
    try:
        await _send(client, path, warmup, load.ClosedLoop(concurrency), timeout_s, "warming up", send)
        cpu_s, begin_s = process_time(), perf_counter()
        samples = await _send(client, path, requests, pace, timeout_s, "measuring", send)
        return Measured(samples, (process_time() - cpu_s) / (perf_counter() - begin_s))
    finally:
        client.close()


async def _send(
    client: Client,
    path: str,
    requests: Sequence[Request],
    pace: load.ClosedLoop | load.OpenLoop,
    timeout_s: float,
    what: str,
    send: load.Send,
) -> list[Any]:
    is_quiet = not sys.stderr.isatty()
    with tqdm(total=len(requests), desc=what, file=sys.stderr, leave=False, disable=is_quiet) as bar:
        return await load.run(client, path, requests, pace, timeout_s, lambda sample: bar.update(), send=send)
