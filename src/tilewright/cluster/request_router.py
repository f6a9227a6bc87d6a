"""Ray Serve's router of requests, by our rule. It runs in the server's process, in a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tilewright.cluster import membership
from tilewright.server.replicas.backend import Route
from tilewright.server.replicas.routing import PrefixRouter


class PrefixRequestRouter(RequestRouter):
    """Sends a request where its Route says: to one replica, or to the one that has its beginning in its caches."""

    def initialize_state(self, **options: Any) -> None:
        self._lock = threading.Lock()  # requests end on threads of Ray
        self._router = PrefixRouter()
        self._loads: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        names = tuple(replica.replica_id.unique_id for replica in replicas)
        for name in set(membership.running) - set(names):
            self._forget(name)
        membership.running = names
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        name = replica_id.unique_id
        membership.running = tuple(other for other in membership.running if other != name)
        self._forget(name)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, best first. Of a Route to one replica that is gone, any: it sees that it is not meant."""
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
            self._router.note(_route(pending_request).keys, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._lock:  # not below 0: it is also called for a request that could not be sent
            self._loads[replica_id.unique_id] = max(0, self._loads[replica_id.unique_id] - 1)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._router.forget(name)
            del self._loads[name]


def _route(request: PendingRequest) -> Route:
    return next((one for one in request.args if isinstance(one, Route)), Route())
