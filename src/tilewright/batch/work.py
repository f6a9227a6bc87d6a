"""Answers the requests of a batch, many at once, so that the engine is never idle."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.batch.requests import Request
from tilewright.batch.results import record
from tilewright.server.answers import Answer
from tilewright.server.endpoints import ENDPOINTS, Context, Gate
from tilewright.server.errors import as_api_error
from tilewright.server.link.backend import AnswerDelta, Backend, Ended, ModelInfo, Started
from tilewright.server.responses import History

_log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts of a batch so far."""

    num_answered: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed


class BatchWorkers:
    """Answers requests, and delivers each line of the output as it is ready."""

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        gate: Gate,
        deliver: Callable[[Mapping[str, Any]], None],
        totals: Totals,
    ) -> None:
        self._backend = backend
        self._context = Context(model, gate, History(max_size_bytes=0))  # no previous_response_id in a batch
        self._deliver = deliver
        self._totals = totals

    async def work(self, requests: Iterator[Request], concurrency: int) -> None:
        """Returns when all requests are done. When it is cancelled or fails, those under way are aborted."""
        workers = [asyncio.create_task(self._work(requests)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, requests: Iterator[Request]) -> None:
        for request in requests:
            status, body = await self._answer(request)
            self._deliver(record(request.custom_id, request.id, f"req_{uuid.uuid4().hex}", status, body))
            if status == 200:
                self._totals.num_answered += 1
            else:
                self._totals.num_failed += 1
            await asyncio.sleep(0)  # requests that fail at once must not block all others

    async def _answer(self, request: Request) -> tuple[int, Mapping[str, Any]]:
        try:
            return 200, await self._result(request)
        except Exception as error:
            known = as_api_error(error)
            if known.code == "internal_error":
                _log.error("custom_id %r failed", request.custom_id, exc_info=error)
            return known.status, known.body()

    async def _result(self, request: Request) -> Mapping[str, Any]:
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
        assert isinstance(result, Mapping), "a batch has no endpoint whose answer is no object"
        # All requests run together: timings mean little, and would make equal answers differ.
        return {name: value for name, value in result.items() if name != "timings"}
