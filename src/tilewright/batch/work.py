"""Answers the requests of a batch concurrently, so that the engine is never idle, and shows the progress.

Signals and failed threads stop it early. A batch on this machine has one engine. On several machines each has a
`BatchWorker`, which receives blocks of requests from Ray Data.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from tilewright.batch.requests import BatchRequest, LinePlace, PathGate, read_request
from tilewright.batch.results import record
from tilewright.flags import engine as engine_flags
from tilewright.flags import replicas
from tilewright.host import files
from tilewright.inputs.media import MediaLimits
from tilewright.process.child import end_with_thread
from tilewright.server.api.endpoints import ENDPOINTS, Context, Gate
from tilewright.server.api.responses.request import ResponseHistory
from tilewright.server.http.bodies import to_json
from tilewright.server.http.errors import as_api_error
from tilewright.server.http.respond import Answer
from tilewright.server.link.backend import AnswerDelta, Backend, Ended, ModelInfo, Started
from tilewright.server.link.remote import LocalBackend
from tilewright.server.media.gate import MediaGate, MediaPolicy
from tilewright.types import RequestError

ENGINE_LOST = 70  # exit status when a thread of the engine fails
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger(__name__)


class InterruptHandler:
    """Cancels a task when a signal arrives, or when a thread fails, whose requests would never end.

    A second signal has its usual effect.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._loop = asyncio.get_running_loop()
        self.status = 0  # exit status; 0: not interrupted

    def __enter__(self) -> InterruptHandler:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._stop, 128 + number)
        self._other_hook, threading.excepthook = threading.excepthook, self._on_thread_error
        return self

    def __exit__(self, *error: object) -> None:
        threading.excepthook = self._other_hook
        self._restore_signals()

    def _stop(self, status: int) -> None:
        self.status = status
        self._task.cancel()
        self._restore_signals()

    def _restore_signals(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _on_thread_error(self, arguments: threading.ExceptHookArgs) -> None:
        _log.critical("a thread failed", exc_info=arguments.exc_value)
        self._loop.call_soon_threadsafe(self._stop, ENGINE_LOST)


BAR_INTERVAL_S = 0.5
LINE_INTERVAL_S = 60.0


class BatchProgress:
    """Shows Totals on standard error during a batch."""

    def __init__(self, totals: Totals, num_requests: int, num_tokens: Callable[[], int], *, is_quiet: bool) -> None:
        """`num_tokens` returns the tokens generated so far, those of running answers included."""
        self._totals = totals
        self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._is_quiet = is_quiet
        self._began_s = time.perf_counter()

    async def show(self) -> None:
        """Show the progress until cancelled."""
        if sys.stderr.isatty() and not self._is_quiet:
            await self._draw()
        while not self._is_quiet:
            await asyncio.sleep(LINE_INTERVAL_S)
            print(f"{self._counts()}, {self._speed()}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        totals, took_s = self._totals, time.perf_counter() - self._began_s
        tokens = f"{totals.num_prompt_tokens} prompt and {totals.num_output_tokens} output tokens"
        return f"{self._counts()}; {tokens} in {took_s:.1f} s, {self._speed()}"

    def _counts(self) -> str:
        return f"{self._totals.num_done} of {self._num_requests} done, {self._totals.num_failed} failed"

    def _speed(self) -> str:
        speed = self._num_tokens() / (time.perf_counter() - self._began_s)
        return f"{speed:.1f} tokens/s"

    async def _draw(self) -> None:
        bar = tqdm(total=self._num_requests, initial=self._totals.num_done, unit="request", dynamic_ncols=True)
        try:
            while True:
                self._update(bar)
                await asyncio.sleep(BAR_INTERVAL_S)
        finally:
            self._update(bar)
            bar.close()

    def _update(self, bar: tqdm) -> None:
        bar.set_postfix_str(f"{self._totals.num_failed} failed, {self._speed()}", refresh=False)
        bar.update(self._totals.num_done - bar.n)


Block = dict[str, np.ndarray]  # columns of equal length
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerSettings:
    """Settings to start a worker with."""

    engine: Mapping[str, Any]  # the Engine's options
    name: str  # of the model
    path: Path  # of the requests
    max_line_bytes: int
    media_limits: MediaLimits
    allow_private_urls: bool
    num_cpus: int  # per worker
    num_workers: int


class BatchWorker:
    """Answers blocks of requests. Several threads call it, so that its engine always has requests."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        options = replicas.local_options(dict(settings.engine), settings.num_cpus, settings.num_workers)
        self._engine = engine_flags.make_engine(**options, isolate_media=True, media_limits=settings.media_limits)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="answers").start()
        self._run(self._open())

    async def _open(self) -> None:
        settings = self._settings
        self._backend = LocalBackend(self._engine)
        self._model = replace(self._backend.model, name=settings.name)
        policy = MediaPolicy(
            settings.media_limits, allow_private_addresses=settings.allow_private_urls, folders=(Path("/"),)
        )
        self._gate = PathGate(MediaGate(policy), settings.path.parent)

    def __call__(self, block: Block) -> Block:
        """Return, for a block of LinePlaces, the output lines as JSON, and their numbers of tokens."""
        places = [LinePlace(*map(int, row)) for row in zip(*(block[name] for name in LinePlace._fields), strict=True)]
        answers = self._run(self._answer_all(self._read(places)))
        return {
            "number": np.array([place.number for place in places]),
            "line": np.array([to_json(line) for line, _ in answers], dtype=object),
            "num_prompt_tokens": np.array([totals.num_prompt_tokens for _, totals in answers]),
            "num_output_tokens": np.array([totals.num_output_tokens for _, totals in answers]),
        }

    def close(self) -> None:
        """Close the engine. Ray does not call this but ends the process."""
        self._engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _read(self, places: Sequence[LinePlace]) -> list[BatchRequest]:
        settings = self._settings
        try:
            with files.open_regular(settings.path) as file:
                return [read_request(file, place, ENDPOINTS, settings.max_line_bytes) for place in places]
        except OSError as error:
            raise RequestError(f"{settings.path} cannot be read on every machine: {error.strerror}") from error

    async def _answer_all(self, requests: Sequence[BatchRequest]) -> list[tuple[Mapping[str, Any], Totals]]:
        return await asyncio.gather(*map(self._answer, requests))

    async def _answer(self, request: BatchRequest) -> tuple[Mapping[str, Any], Totals]:
        lines: list[Mapping[str, Any]] = []
        totals = Totals()
        await BatchWorkers(self._backend, self._model, self._gate, lines.append, totals).work(iter([request]), 1)
        return lines[0], totals

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class BatchActor(BatchWorker):
    """A BatchWorker in a process of its own."""

    def __init__(self, settings: WorkerSettings) -> None:
        # An engine without its thread would hang; when the process ends, Ray Data sends its blocks to another worker.
        threading.excepthook = end_with_thread
        super().__init__(settings)


def rows_of(block: Block) -> list[tuple[int, dict[str, Any], int, int]]:
    """Return (number, output line, prompt tokens, output tokens) of each request of an answered block."""
    columns = (block["number"], block["line"], block["num_prompt_tokens"], block["num_output_tokens"])
    return [(int(one[0]), json.loads(one[1]), int(one[2]), int(one[3])) for one in zip(*columns, strict=True)]


@dataclass
class Totals:
    """The counts of a batch so far."""

    num_answered: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed


class BatchWorkers:
    """Answers requests and delivers each output line when it is ready."""

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        gate: Gate,
        deliver: Callable[[Mapping[str, Any]], None],
        totals: Totals,
    ) -> None:
        self._backend = backend
        self._context = Context(model, gate, ResponseHistory(max_size_bytes=0))  # no previous_response_id in a batch
        self._deliver = deliver
        self._totals = totals

    async def work(self, requests: Iterator[BatchRequest], concurrency: int) -> None:
        """Answer all requests; abort running ones on cancellation or failure."""
        workers = [asyncio.create_task(self._work(requests)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            status, body = await self._answer(request)
            self._deliver(record(request.custom_id, request.id, f"req_{uuid.uuid4().hex}", status, body))
            if status == 200:
                self._totals.num_answered += 1
            else:
                self._totals.num_failed += 1
            await asyncio.sleep(0)  # requests that fail immediately must not block the event loop

    async def _answer(self, request: BatchRequest) -> tuple[int, Mapping[str, Any]]:
        try:
            return 200, await self._result(request)
        except Exception as error:
            known = as_api_error(error)
            if known.code == "internal_error":
                _log.error("custom_id %r failed", request.custom_id, exc_info=error)
            return known.status, known.body()

    async def _result(self, request: BatchRequest) -> Mapping[str, Any]:
        endpoint = ENDPOINTS[request.url]
        body = endpoint.body.model_validate(request.body)
        requests, make_writer = await endpoint.prepare(body, self._context)
        writer = make_writer()
        answer = Answer(self._backend, requests)
        num_left = answer.num_prompts
        try:
            while num_left:
                prompt_index, event = await answer.next()
                assert isinstance(event, Started | AnswerDelta | Ended), "there is no client"
                for _ in writer.add(prompt_index, event):
                    pass
                if isinstance(event, Ended):
                    num_left -= 1
                    self._totals.num_prompt_tokens += event.num_prompt_tokens
                    self._totals.num_output_tokens += event.num_output_tokens
        finally:
            answer.abort()
        result = writer.result()
        assert isinstance(result, Mapping), "all endpoints of a batch answer with an object"
        # All requests run concurrently: timings mean little, and would make equal answers differ.
        return {name: value for name, value in result.items() if name != "timings"}
