"""The events of an answer: those of the engine and of the connection, in one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tilewright.server.link.backend import (
    Abort,
    AnswerDelta,
    Backend,
    Ended,
    EngineRequest,
    Event,
    Failed,
    Restarted,
    Started,
)


@dataclass(frozen=True)
class ClientLeft:
    """The client has left."""


@dataclass(frozen=True)
class TimedOut:
    """The request has reached its timeout."""


@dataclass(frozen=True)
class ShuttingDown:
    """The server shuts down, and its drain timeout is over."""


@dataclass(frozen=True)
class KeepAliveDue:
    """Nothing was sent for a while; a proxy in between may close the connection."""


AnswerEvent = Started | AnswerDelta | Ended | Restarted | ClientLeft | TimedOut | ShuttingDown | KeepAliveDue


class Answer:
    """The events of all prompts of one request, in order. Its one reader calls `abort` at the end."""

    def __init__(self, backend: Backend, requests: Sequence[EngineRequest]) -> None:
        self._events: asyncio.Queue[tuple[int, Event | AnswerEvent]] = asyncio.Queue()  # as long as the answer at most
        self._aborts: list[Abort] = []
        self.num_prompts = len(requests)
        try:
            for prompt_index, request in enumerate(requests):
                self._aborts.append(backend.submit(request, partial(self._put, prompt_index)))
        except BaseException:
            self.abort()
            raise

    def notify(self, event: ClientLeft | TimedOut | ShuttingDown | KeepAliveDue) -> None:
        """Adds an event that is not the engine's."""
        self._put(0, event)

    async def next(self) -> tuple[int, AnswerEvent]:
        """The index of a prompt and its next event; raises the error of a Failed one."""
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
