"""Several engines as one Backend: requests are routed, and computed again elsewhere when their replica is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.server.link.backend import (
    Abort,
    EngineRequest,
    EngineUnavailable,
    Event,
    Failed,
    Listener,
    ModelInfo,
)
from tilewright.server.link.service import failure
from tilewright.server.replicas.prefix_keys import prefix_keys
from tilewright.server.replicas.recovery import Recovery, with_seed
from tilewright.server.replicas.stats import combined
from tilewright.types import RequestError

_log = logging.getLogger(__name__)

# A request that ends its engine must not end one after the other: it is given up after so many.
MAX_LOST = 3
PAUSE_S = 1.0  # before a request is sent again, while all engines are being restarted
STATS_TIMEOUT_S = 2.0  # a replica's own query of its engine takes up to 1.5 s


class ReplicaLost(Exception):
    """The replica that computed a request has ended, or does not answer."""


@dataclass(frozen=True)
class Route:
    """What a request is routed by."""

    keys: Sequence[bytes] = ()  # of its beginnings
    avoid: Collection[str] = ()  # replicas that could not compute it
    only: str | None = None  # the one replica that is meant


class Replicas(Protocol):
    """Engines on one or many machines, which are started and replaced behind this interface."""

    @property
    def running(self) -> Sequence[str]:
        """The names of the replicas that take requests."""

    async def start(self) -> ModelInfo:
        """Starts them; returns when all are ready. EngineRefused, with the reason, if they cannot start."""

    def answer(self, request: EngineRequest, route: Route) -> AsyncGenerator[tuple[str, Sequence[Event]], None]:
        """The name of the replica that computes the request, and its next events; no events if it has no engine yet.

        ReplicaLost when the replica is lost. Closing the generator ends the request.
        """

    async def stats(self, replica: str) -> Mapping[str, float] | None:
        """The stats of one replica; None if it is gone."""

    async def replace_all(self) -> None:
        """Begins to replace them one by one; those replaced finish what they compute."""

    async def close(self) -> None:
        """Ends them all."""


class ReplicaBackend:
    """A Backend in front of Replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._model: ModelInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: set[str] = set()

    async def start(self) -> None:
        """Returns when the replicas are ready; EngineRefused, with the reason, if they cannot start."""
        self._model = await self._replicas.start()

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineUnavailable("the model is loading; try again later")
        # As many answers are computed together as all replicas do.
        num_replicas = max(1, len(self._replicas.running))
        return dataclasses.replace(self._model, max_sequences=num_replicas * self._model.max_sequences)

    @property
    def num_restarts(self) -> int:
        """How many replicas were lost, or had to restart their engines."""
        return len(self._lost)

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        if self._model is None:
            raise EngineUnavailable("the engines are starting; try again later")
        try:
            keys = prefix_keys(request)
        except RecursionError:
            raise RequestError("the request has values that are nested too deeply") from None
        task = self._keep(self._answer(with_seed(request), keys, listener))

        def abort() -> None:
            task.cancel()

        return abort

    async def stats(self) -> Mapping[str, float]:
        """The stats of all replicas together, and how many answer."""
        names = self._replicas.running
        calls = [asyncio.wait_for(self._replicas.stats(name), STATS_TIMEOUT_S) for name in names]
        found = await asyncio.gather(*calls, return_exceptions=True)
        stats = [item for item in found if isinstance(item, Mapping)]
        if not stats:
            raise EngineUnavailable(f"none of {len(names)} replicas answers" if names else "no replica is running")
        return combined(stats)

    def replace_all(self) -> None:
        """Begins to replace the replicas one by one, without losing a request."""
        if self._model is not None:  # else they are being started
            _log.info("replacing the replicas, one by one")
            self._keep(self._replicas.replace_all())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._replicas.close()

    def _keep(self, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task, with a reference to it: the event loop has none."""
        task = asyncio.get_running_loop().create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, request: EngineRequest, keys: Sequence[bytes], listener: Listener) -> None:
        """Computes a request on a replica, and on another one if that is lost. Waits while no engine is ready."""
        recovery = Recovery(listener)
        avoid: set[str] = set()
        num_lost = 0
        while not recovery.has_ended:
            if avoid and avoid >= set(self._replicas.running):
                await asyncio.sleep(PAUSE_S)
                avoid.clear()
            recovery.begin()
            try:
                await self._attempt(request, Route(keys, tuple(avoid)), recovery)
            except _NotReady as error:
                avoid.add(error.replica)
            except ReplicaLost as error:
                num_lost += 1
                _log.warning("a replica was lost with a request under way: %s", error)
                if num_lost == MAX_LOST:
                    message = f"{num_lost} replicas were lost with this request under way ({error}); send it again"
                    recovery.add(Failed("unavailable", message))
            except Exception as error:
                recovery.add(failure(error, request))

    async def _attempt(self, request: EngineRequest, route: Route, recovery: Recovery) -> None:
        replica = "unknown"
        stream = self._replicas.answer(request, route)
        try:
            async for replica, events in stream:
                if not events:
                    raise _NotReady(replica)
                for event in events:
                    if isinstance(event, Failed) and event.kind == "unavailable":
                        raise ReplicaLost(event.message)
                    recovery.add(event)
            if not recovery.has_ended:
                raise ReplicaLost("it ended the request without an answer")
        except (ReplicaLost, _NotReady):
            self._lost.add(replica)
            raise
        finally:
            await stream.aclose()


class _NotReady(Exception):
    """A replica whose engine is being restarted."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica
