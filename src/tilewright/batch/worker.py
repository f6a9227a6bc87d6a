"""A worker of a batch over several machines: an engine, and the requests that Ray Data brings it in blocks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tilewright import engine_flags, files, replica_flags
from tilewright.batch.paths import PathGate
from tilewright.batch.requests import Place, Request, read_request
from tilewright.batch.work import BatchWorkers, Totals
from tilewright.inputs.media import MediaLimits
from tilewright.server.endpoints import ENDPOINTS
from tilewright.server.json_text import to_json
from tilewright.server.link.local import LocalBackend
from tilewright.server.link.process import end_with_thread
from tilewright.server.media.gate import MediaGate, MediaPolicy
from tilewright.types import RequestError

Block = dict[str, np.ndarray]  # columns of equal length
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with."""

    engine: Mapping[str, Any]  # the Engine's options
    name: str  # of the model
    path: Path  # of the requests
    max_line_bytes: int
    media_limits: MediaLimits
    allow_private_urls: bool
    num_cpus: int  # of one worker
    num_workers: int


class BatchWorker:
    """Answers blocks of requests; called from several threads, so that its engine always has some."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        options = replica_flags.local_options(dict(settings.engine), settings.num_cpus, settings.num_workers)
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
        """The lines of the output for a block of Places, as JSON, and the tokens they took."""
        places = [Place(*map(int, row)) for row in zip(*(block[name] for name in Place._fields), strict=True)]
        answers = self._run(self._answer_all(self._read(places)))
        return {
            "number": np.array([place.number for place in places]),
            "line": np.array([to_json(line) for line, _ in answers], dtype=object),
            "num_prompt_tokens": np.array([totals.num_prompt_tokens for _, totals in answers]),
            "num_output_tokens": np.array([totals.num_output_tokens for _, totals in answers]),
        }

    def close(self) -> None:
        """Ends the engine; Ray ends the process instead."""
        self._engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _read(self, places: Sequence[Place]) -> list[Request]:
        settings = self._settings
        try:
            with files.open_regular(settings.path) as file:
                return [read_request(file, place, ENDPOINTS, settings.max_line_bytes) for place in places]
        except OSError as error:
            raise RequestError(f"{settings.path} cannot be read on every machine: {error.strerror}") from error

    async def _answer_all(self, requests: Sequence[Request]) -> list[tuple[Mapping[str, Any], Totals]]:
        return await asyncio.gather(*map(self._answer, requests))

    async def _answer(self, request: Request) -> tuple[Mapping[str, Any], Totals]:
        lines: list[Mapping[str, Any]] = []
        totals = Totals()
        await BatchWorkers(self._backend, self._model, self._gate, lines.append, totals).work(iter([request]), 1)
        return lines[0], totals

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class BatchActor(BatchWorker):
    """A BatchWorker that has a process to itself."""

    def __init__(self, settings: WorkerSettings) -> None:
        # An engine without its thread would hang; without the process, Ray Data gives its blocks to another.
        threading.excepthook = end_with_thread
        super().__init__(settings)


def rows_of(block: Block) -> list[tuple[int, dict[str, Any], int, int]]:
    """(number, line of the output, prompt tokens, output tokens) of each request of a block that was answered."""
    columns = (block["number"], block["line"], block["num_prompt_tokens"], block["num_output_tokens"])
    return [(int(one[0]), json.loads(one[1]), int(one[2]), int(one[3])) for one in zip(*columns, strict=True)]
