"""Runs a batch on several machines: Ray Data sends blocks of requests to workers, again if a worker is lost."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from tilewright.batch.requests import LinePlace, RequestFile
from tilewright.batch.work import BatchActor, Block, Totals, WorkerSettings, rows_of
from tilewright.types import RequestError

# Blocks at once on a worker: one begins while the other ends, so that the engine is not idle in between.
BLOCKS_AT_ONCE = 2
# Blocks of all requests per worker, so that no worker has much left to do when the others are done.
BLOCKS_PER_WORKER = 4
# A request that crashes its worker must not crash workers for ever.
MAX_RETRIES = 3


class WorkersLost(Exception):
    """Workers ended repeatedly with the same requests."""


class BlockWriter:
    """Writes each answer once, although the whole block of a lost worker is answered again."""

    def __init__(self, requests: RequestFile, append: Callable[[Mapping[str, Any]], None], totals: Totals) -> None:
        self._requests = requests
        self._append = append
        self._totals = totals

    def write(self, block: Block) -> None:
        for number, line, num_prompt_tokens, num_output_tokens in rows_of(block):
            if not self._requests.finish(number):
                continue
            self._append(line)
            self._totals.num_prompt_tokens += num_prompt_tokens
            self._totals.num_output_tokens += num_output_tokens
            if line["response"]["status_code"] == 200:
                self._totals.num_answered += 1
            else:
                self._totals.num_failed += 1


async def answer_all(requests: RequestFile, writer: BlockWriter, settings: WorkerSettings, concurrency: int) -> None:
    """Answer all requests; raise RequestError or WorkersLost, with the reason, if that fails.

    `concurrency` is the number of requests at once per worker. A thread receives the blocks; it ends with the
    connection to Ray, also when this function is cancelled.
    """
    loop = asyncio.get_running_loop()
    arriving: asyncio.Queue[Block | Exception | None] = asyncio.Queue()

    def put(item: Block | Exception | None) -> None:
        loop.call_soon_threadsafe(arriving.put_nowait, item)

    def pull() -> None:
        try:
            for block in _answered_blocks(requests, settings, concurrency):
                put(block)
            put(None)
        except Exception as error:
            put(error)

    threading.Thread(target=pull, daemon=True, name="ray-data").start()
    while (item := await arriving.get()) is not None:
        if isinstance(item, Exception):
            raise _known(item) from item
        writer.write(item)


def num_per_block(num_requests: int, num_workers: int, concurrency: int) -> int:
    """Return the number of requests per block."""
    share = -(-num_requests // (BLOCKS_PER_WORKER * num_workers))
    return max(1, min(share, concurrency // BLOCKS_AT_ONCE))


def _answered_blocks(requests: RequestFile, settings: WorkerSettings, concurrency: int) -> Iterator[Block]:
    import pyarrow
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray.data._internal"):
        logging.getLogger(name).setLevel(logging.ERROR)
    size = num_per_block(len(requests) - requests.num_done, settings.num_workers, concurrency)
    schema = pyarrow.schema({"number": pyarrow.int64(), "offset": pyarrow.int64(), "fingerprint": pyarrow.uint64()})
    places = requests.places_left()
    tables = []
    while block := list(islice(places, size)):
        columns = dict(zip(LinePlace._fields, zip(*block, strict=True), strict=True))
        tables.append(pyarrow.table(columns, schema=schema))
    answered = ray.data.from_arrow(tables).map_batches(
        BatchActor,
        fn_constructor_args=(settings,),
        batch_size=None,
        batch_format="numpy",
        num_cpus=settings.num_cpus,
        compute=ray.data.ActorPoolStrategy(
            size=settings.num_workers,
            max_tasks_in_flight_per_actor=BLOCKS_AT_ONCE + 1,
            max_concurrent_calls_per_actor=BLOCKS_AT_ONCE,
            enable_true_multi_threading=True,
        ),
        ray_remote_args_fn=_worker_options,
    )
    yield from answered.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)


def _worker_options() -> dict[str, Any]:
    return {"max_task_retries": MAX_RETRIES}


def _known(error: Exception) -> Exception:
    """Return the RequestError that Ray has wrapped, else WorkersLost."""
    refusals = re.findall(r"RequestError: (.+)", str(error))
    if refusals:
        return RequestError(refusals[-1])
    return WorkersLost(str(error).strip().split("\n")[0])
