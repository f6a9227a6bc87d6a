"""An answer on its way to a client: the engine's events and the client's own, in one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tilewright.server.link.backend import Abort, AnswerDelta, Backend, Ended, EngineRequest, Event, Failed, Started


@dataclass(frozen=True)
class Gone:
    """The client has left."""


@dataclass(frozen=True)
class TimedOut:
    """The request has taken longer than it may."""


@dataclass(frozen=True)
class Cut:
    """The server ends, and waits no longer for what it is answering."""


@dataclass(frozen=True)
class Quiet:
    """Nothing has come for a while; a proxy in between may think the connection dead."""


AnswerEvent = Started | AnswerDelta | Ended | Gone | TimedOut | Cut | Quiet


class Answer:
    """What happens to the prompts of one request, in order; for one reader, who aborts it when done."""

    def __init__(self, backend: Backend, requests: Sequence[EngineRequest]) -> None:
        self._events: asyncio.Queue[tuple[int, Event | AnswerEvent]] = asyncio.Queue()  # bounded by what is answered
        self._aborts: list[Abort] = []
        self.num_prompts = len(requests)
        try:
            for prompt_index, request in enumerate(requests):
                self._aborts.append(backend.submit(request, partial(self._put, prompt_index)))
        except BaseException:
            self.abort()
            raise

    def tell(self, happening: Gone | TimedOut | Cut | Quiet) -> None:
        """Adds what did not come from the engine."""
        self._put(0, happening)

    async def next(self) -> tuple[int, AnswerEvent]:
        """The number of a prompt and what happened to it; raises what went wrong."""
        prompt_index, event = await self._events.get()
        if isinstance(event, Failed):
            raise event.error()
        return prompt_index, event

    def abort(self) -> None:
        """Frees what is still being computed."""
        for abort in self._aborts:
            abort()

    def _put(self, prompt_index: int, event: Event | AnswerEvent) -> None:
        self._events.put_nowait((prompt_index, event))
