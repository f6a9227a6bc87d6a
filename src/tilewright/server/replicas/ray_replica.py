"""A replica, which is an actor of Ray Serve that starts and watches an engine process; and the replicas' router."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tilewright.flags.replicas import local_options
from tilewright.process.child import THREAD_LOST
from tilewright.process.log import LogSettings
from tilewright.server.api.handler import MAX_STEP_S
from tilewright.server.link.backend import Ended, EngineRequest, Event, Failed, ModelInfo
from tilewright.server.link.remote import RemoteBackend
from tilewright.server.link.service import failure
from tilewright.server.replicas import routing
from tilewright.server.replicas.backend import Route
from tilewright.server.replicas.routing import PrefixRouter
from tilewright.types import EngineUnavailable

_log = logging.getLogger(__name__)

MAX_RESTART_S = 600.0  # to load a large model again
MAX_SILENT = 3


class EngineReplica:
    """One engine. Its methods have the request's Route as an argument, which Ray Serve's router reads."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: Mapping[str, Any], *, num_cpus: int, num_replicas: int, log: LogSettings
    ) -> None:
        """Raise ProcessRefused if the engine cannot start: Ray Serve then retries, on another machine if possible."""
        log.configure()
        self._name: str = serve.get_replica_context().replica_id.unique_id
        options = local_options(dict(options), num_cpus, num_replicas)
        self._backend = RemoteBackend(options, log)
        await self._backend.start()
        self._ready_s = time.monotonic()
        self._num_silent = 0  # health checks that the engine did not respond to

    async def check_health(self) -> None:
        """Raise if the engine does not work; Ray Serve calls this regularly, and replaces the replica after 3 failures.

        A replica whose engine hangs ends itself instead: Ray Serve would let it finish its requests first.
        """
        if not self._backend.is_ready:
            self._num_silent = 0
            if time.monotonic() - self._ready_s > MAX_RESTART_S:
                raise EngineUnavailable(f"the engine could not be restarted for {MAX_RESTART_S:.0f} s")
            return  # restarting; requests go to other replicas meanwhile
        self._ready_s = time.monotonic()
        try:
            hangs = (await self._backend.stats())["step_age_s"] > MAX_STEP_S
            self._num_silent = 0
        except EngineUnavailable:
            self._num_silent += 1
            hangs = self._num_silent == MAX_SILENT
        if hangs:
            _log.critical("the engine hangs: the replica ends, to be replaced")
            os._exit(THREAD_LOST)

    async def model(self, route: Route) -> ModelInfo:
        return self._backend.model

    async def stats(self, route: Route) -> Mapping[str, float] | None:
        return await self._backend.stats() if route.only == self._name else None

    async def answer(self, request: EngineRequest, route: Route) -> AsyncGenerator[tuple[str, Sequence[Event]], None]:
        """Yield the events of a request, one list per step. Ray Serve cancels it when the client leaves."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        try:
            abort = self._backend.submit(request, queue.put_nowait)
        except EngineUnavailable:  # restarting
            yield self._name, []
            return
        except Exception as error:
            yield self._name, [failure(error, request)]
            return
        try:
            events: list[Event] = []
            while not events or not isinstance(events[-1], Ended | Failed):
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                yield self._name, events
        finally:
            abort()


logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it would log every request, as the server does already


class PrefixRequestRouter(RequestRouter):
    """Routes a request as its Route says: to a given replica, or to one that has its prefix in its caches."""

    def initialize_state(self, **options: Any) -> None:
        self._lock = threading.Lock()  # requests end on threads of Ray
        self._router = PrefixRouter()
        self._loads: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        names = tuple(replica.replica_id.unique_id for replica in replicas)
        for name in set(routing.running) - set(names):
            self._forget(name)
        routing.running = names
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        name = replica_id.unique_id
        routing.running = tuple(other for other in routing.running if other != name)
        self._forget(name)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, best first. If the Route's only replica is gone, any: `stats` then returns None."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        route = _route(pending_request)
        if route.only in by_name:
            return [[by_name[route.only]]]
        with self._lock:
            names = self._router.rank(route.keys, {name: self._loads[name] for name in by_name}, route.avoid)
        return [[by_name[name]] for name in names]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        with self._lock:
            self._loads[replica_id.unique_id] += 1
        super().on_send_request(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        with self._lock:
            self._router.record(_route(pending_request).keys, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._lock:  # not below 0: also called for a request that could not be sent
            self._loads[replica_id.unique_id] = max(0, self._loads[replica_id.unique_id] - 1)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._router.forget(name)
            del self._loads[name]


def _route(request: PendingRequest) -> Route:
    return next((one for one in request.args if isinstance(one, Route)), Route())
