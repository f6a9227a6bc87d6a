"""Several engines as one Backend: routes requests, and computes them on another replica when theirs is lost.

The listener of a request that is computed more than once receives each token once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.server.link.backend import (
    Abort,
    AnswerDelta,
    Ended,
    EngineRequest,
    Event,
    Failed,
    Listener,
    ModelInfo,
    Restarted,
    Started,
)
from tilewright.server.link.service import failure
from tilewright.server.replicas.routing import combined, prefix_keys
from tilewright.types import EngineUnavailable, FinishReason, RequestError


def with_seed(request: EngineRequest) -> EngineRequest:
    """Return the request with a seed, random if it has none: another replica then samples the same tokens.

    Random numbers depend on the seed and the position only, not on other requests of the batch.
    """
    if request.sampling.get("seed") is not None:
        return request
    return dataclasses.replace(request, sampling={**request.sampling, "seed": secrets.randbits(63)})


@dataclass
class _Progress:
    """The part of one of the n answers that was received so far."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class Recovery:
    """Passes the events of one request on, over one or more attempts to compute it.

    A later attempt repeats what was already passed on, which is compared and left out. If it differs, for example on a
    CPU with other instructions, the listener gets `Restarted` and all events of the later attempt.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._passed: dict[int, _Progress] = {}  # answer index -> text passed on
        self._seen: dict[int, _Progress] = {}  # in this attempt
        self._events: list[Event] = []  # of this attempt, unless it is the first
        self._has_started = False
        self.num_attempts = 0
        self.has_ended = False

    def begin(self) -> None:
        """Begin a new attempt."""
        self.num_attempts += 1
        self._seen = {}
        self._events = []

    def add(self, event: Event) -> None:
        """Pass on the part of an event that the listener does not have yet."""
        if self.num_attempts > 1 and isinstance(event, Started | AnswerDelta):
            self._events.append(event)
        if isinstance(event, Started):
            if not self._has_started:
                self._has_started = True
                self._listener(event)
        elif isinstance(event, AnswerDelta):
            self._add_delta(event)
        else:
            if isinstance(event, Ended) and not self._agrees_at_the_end():
                self._restart()
            self.has_ended = isinstance(event, Ended | Failed)
            self._listener(event)

    def _add_delta(self, delta: AnswerDelta) -> None:
        passed = self._passed.setdefault(delta.index, _Progress())
        seen = self._seen.setdefault(delta.index, _Progress())
        is_new = seen == passed
        seen.text += delta.text
        seen.num_tokens += delta.num_tokens
        seen.finish_reason = seen.finish_reason or delta.finish_reason
        if is_new:  # past the end of earlier attempts
            self._passed[delta.index] = dataclasses.replace(seen)
            self._listener(delta)
            return
        length = min(len(seen.text), len(passed.text))
        has_stopped_early = seen.finish_reason is not None and len(seen.text) < len(passed.text)
        if seen.text[:length] != passed.text[:length] or has_stopped_early:
            self._restart()
            return
        num_new_tokens = max(0, seen.num_tokens - passed.num_tokens)
        new_text = seen.text[len(passed.text) :]
        finish_reason = seen.finish_reason if passed.finish_reason is None else None
        if new_text or num_new_tokens or finish_reason:
            logprobs = delta.logprobs
            if logprobs is not None:
                logprobs = logprobs[max(0, len(logprobs) - num_new_tokens) :]
            passed.text += new_text
            passed.num_tokens += num_new_tokens
            passed.finish_reason = passed.finish_reason or finish_reason
            self._listener(AnswerDelta(delta.index, new_text, num_new_tokens, finish_reason, logprobs))

    def _agrees_at_the_end(self) -> bool:
        return all(self._seen.get(index, _Progress()).text == passed.text for index, passed in self._passed.items())

    def _restart(self) -> None:
        """Restart the listener with the events of this attempt."""
        self._passed = {index: dataclasses.replace(seen) for index, seen in self._seen.items()}
        self._listener(Restarted())
        for event in self._events:
            self._listener(event)


_log = logging.getLogger(__name__)

# A request that crashes its engine must not crash all of them: it fails after this many.
MAX_LOST = 3
PAUSE_S = 1.0  # before a request is sent again, while all engines are being restarted
STATS_TIMEOUT_S = 2.0  # a replica's query of its engine takes up to 1.5 s


class ReplicaLost(Exception):
    """The replica that computed a request has ended or does not respond."""


@dataclass(frozen=True)
class Route:
    """The criteria for routing a request."""

    keys: Sequence[bytes] = ()  # prefix keys
    avoid: Collection[str] = ()  # replicas that could not compute it
    only: str | None = None  # the only replica allowed


class Replicas(Protocol):
    """Engines on one or many machines, which the implementation starts and replaces."""

    @property
    def running(self) -> Sequence[str]:
        """The names of the replicas that accept requests."""

    async def start(self) -> ModelInfo:
        """Start the replicas, wait until all are ready; raise ProcessRefused, with the reason, if one cannot start."""

    def answer(self, request: EngineRequest, route: Route) -> AsyncGenerator[tuple[str, Sequence[Event]], None]:
        """Yield the name of the replica that computes the request, and its next events (none: its engine is not ready).

        Raise ReplicaLost when the replica is lost. Closing the generator aborts the request.
        """

    async def stats(self, replica: str) -> Mapping[str, float] | None:
        """Return the stats of one replica; None if it is gone."""

    async def replace_all(self) -> None:
        """Begin to replace the replicas one by one; replaced replicas finish their requests."""

    async def close(self) -> None:
        """End all replicas."""


class ReplicaBackend:
    """A Backend in front of Replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._model: ModelInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: set[str] = set()

    async def start(self) -> None:
        """Start the replicas and wait until all are ready; raise ProcessRefused with the reason if one cannot start."""
        self._model = await self._replicas.start()

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineUnavailable("the model is loading; try again later")
        # The limits of all replicas add up.
        num_replicas = max(1, len(self._replicas.running))
        return dataclasses.replace(self._model, max_sequences=num_replicas * self._model.max_sequences)

    @property
    def num_restarts(self) -> int:
        """The number of replicas that were lost, or had to restart their engines."""
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
        """Return the combined stats of all replicas that respond."""
        names = self._replicas.running
        calls = [asyncio.wait_for(self._replicas.stats(name), STATS_TIMEOUT_S) for name in names]
        found = await asyncio.gather(*calls, return_exceptions=True)
        stats = [item for item in found if isinstance(item, Mapping)]
        if not stats:
            raise EngineUnavailable(f"none of {len(names)} replicas answers" if names else "no replica is running")
        return combined(stats)

    def replace_all(self) -> None:
        """Begin to replace the replicas one by one, without losing a request."""
        if self._model is not None:  # otherwise they are being started
            _log.info("replacing the replicas, one by one")
            self._keep(self._replicas.replace_all())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._replicas.close()

    def _keep(self, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task and keep a reference to it: the event loop keeps none."""
        task = asyncio.get_running_loop().create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, request: EngineRequest, keys: Sequence[bytes], listener: Listener) -> None:
        """Compute a request on a replica, or on another one if it is lost. Wait while no engine is ready."""
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
                _log.warning("a replica was lost during a request: %s", error)
                if num_lost == MAX_LOST:
                    message = f"{num_lost} replicas were lost during this request ({error}); send it again"
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
