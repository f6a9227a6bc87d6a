"""The Ray cluster that replicas run on: one that exists, or one of our own on this machine."""

from __future__ import annotations

import logging
import time
from typing import Any

from tilewright import config
from tilewright.replica_flags import cpus_per_replica
from tilewright.types import RequestError

_log = logging.getLogger(__name__)

# For requests on their way, whose pictures and videos it holds. By default Ray takes 30 % of the memory.
OBJECT_STORE_BYTES = 1 << 30
# Ray gives its helper processes 15 s each to start, which a busy machine may exceed, and says nothing else about it.
MAX_STARTS = 3


def connect(address: str | None, num_cpus: int | None = None) -> None:
    """Connects this process to the cluster at `address`, or at RAY_ADDRESS, or starts one of our own.

    A cluster of our own listens on loopback, asks for a random token, and ends with this process. `num_cpus` is how
    many CPUs it counts; None: those that this process may use.
    """
    address = address or config.current().ray_address
    config.prepare_ray(is_own=address is None)
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except Exception as error:  # of many types
            raise RequestError(f"the Ray cluster at {address} cannot be used: {error}") from error
        return
    for number in range(1, MAX_STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus or len(config.current().available_cpus),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
            return
        except Exception as error:  # its own types, and plain Exception for a process that is slow to start
            ray.shutdown()
            if number == MAX_STARTS:
                raise RequestError(f"Ray could not be started on this machine: {error}") from error
            _log.warning("Ray could not be started, trying again: %s", error)
            time.sleep(1.0)


def num_replica_cpus(given: int | None, num_replicas: int) -> int:
    """The CPUs that each of the replicas gets: as many as `given`, or as there are on the cluster's machines."""
    import ray

    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if given is None:
        return cpus_per_replica(nodes, num_replicas)
    if sum(node // given for node in nodes) < num_replicas:
        shown = ", ".join(map(str, nodes))
        raise RequestError(f"{num_replicas} replicas of {given} CPUs do not fit on machines with {shown} CPUs")
    return given


def disconnect() -> None:
    """Leaves the cluster, and ends one of our own."""
    import ray

    ray.shutdown()
