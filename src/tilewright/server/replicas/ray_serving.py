"""The replicas of a server, an application of Ray Serve, which starts, watches, scales and replaces them.

The Ray cluster is an existing one, or is started on this machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from tilewright import config
from tilewright.flags.replicas import ReplicaCount, cpus_per_replica
from tilewright.process.log import LogSettings
from tilewright.process.supervisor import ProcessRefused
from tilewright.server.link.backend import EngineRequest, Event, ModelInfo
from tilewright.server.replicas import routing
from tilewright.server.replicas.backend import ReplicaLost, Route
from tilewright.server.replicas.ray_replica import EngineReplica, PrefixRequestRouter
from tilewright.types import RequestError

_log = logging.getLogger(__name__)

# For requests in transit with their images and videos. Ray's default is 30 % of the memory.
OBJECT_STORE_BYTES = 1 << 30
# Ray gives its helper processes 15 s each to start, which a busy machine may exceed; its error does not say so.
MAX_CLUSTER_STARTS = 3


def connect(address: str | None, num_cpus: int | None = None) -> None:
    """Connect this process to the cluster at `address`, or at RAY_ADDRESS, or start a cluster.

    A cluster started here listens on loopback, requires a random token, and ends with this process. `num_cpus` is the
    number of its CPUs; None: the CPUs that this process may use.
    """
    address = address or config.current().ray_address
    config.prepare_ray(is_own=address is None)
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except Exception as error:  # exceptions of many types
            raise RequestError(f"the Ray cluster at {address} cannot be used: {error}") from error
        return
    for number in range(1, MAX_CLUSTER_STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus or len(config.current().available_cpus),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
            return
        except Exception as error:  # Ray's types, and plain Exception for a process that is slow to start
            ray.shutdown()
            if number == MAX_CLUSTER_STARTS:
                raise RequestError(f"Ray could not be started on this machine: {error}") from error
            _log.warning("Ray could not be started, trying again: %s", error)
            time.sleep(1.0)


def num_replica_cpus(given: int | None, num_replicas: int) -> int:
    """Return the number of CPUs per replica: `given`, or an equal share of the cluster's machines."""
    import ray

    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if given is None:
        return cpus_per_replica(nodes, num_replicas)
    if sum(node // given for node in nodes) < num_replicas:
        shown = ", ".join(map(str, nodes))
        raise RequestError(f"{num_replicas} replicas of {given} CPUs do not fit on machines with {shown} CPUs")
    return given


def disconnect() -> None:
    """Leave the cluster, and end it if this process started it."""
    import ray

    ray.shutdown()


HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
STATUS_PERIOD_S = 0.25
WAITING_LOG_S = 60.0  # between log lines that say what the start waits for, such as CPUs in use by others
MAX_STARTS = 2  # attempts to start an engine
# The server limits the number of requests (--max-queue): replicas do not refuse any.
MAX_ONGOING = 100_000
# With a range of replicas, one more is started when the mean number of requests is above this. An engine computes this
# many answers per step at little more than the cost of one; more answers make each of them slower.
TARGET_ONGOING = 8


@dataclasses.dataclass(frozen=True)
class ReplicaSettings:
    """Settings to start replicas with."""

    engine: Mapping[str, Any]  # the Engine's options
    count: ReplicaCount
    num_cpus: int | None  # per replica; None: an equal share of the cluster
    drain_s: float  # time for a replaced replica to finish its answers
    log: LogSettings


class RayReplicas:
    """Replicas on the cluster that this process is connected to."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        # Several servers may share a cluster.
        self._name = f"tilewright-{uuid.uuid4().hex[:8]}"
        self._handle: Any = None
        # `close` waits for a running deployment: without a connection, Ray Serve would start another cluster.
        self._deploying = threading.Lock()
        self._is_closed = False

    @property
    def running(self) -> Sequence[str]:
        return routing.running

    async def start(self) -> ModelInfo:
        await asyncio.to_thread(self._deploy)
        next_log_s = time.monotonic() + WAITING_LOG_S
        while (found := await self._status()).status != ApplicationStatus.RUNNING:
            if found.status == ApplicationStatus.DEPLOY_FAILED:
                raise ProcessRefused(_reason(found))
            if time.monotonic() > next_log_s:
                states = [dict(one.replica_states) for one in found.deployments.values()]
                _log.warning("the replicas are not ready yet; Ray Serve reports %s", states)
                next_log_s += WAITING_LOG_S
            await asyncio.sleep(STATUS_PERIOD_S)
        self._handle = serve.get_app_handle(self._name)
        model: ModelInfo = await self._handle.model.remote(Route())
        return model

    async def answer(self, request: EngineRequest, route: Route) -> AsyncGenerator[tuple[str, Sequence[Event]], None]:
        stream = self._handle.options(stream=True).answer.remote(request, route)
        try:
            async for item in stream:
                yield item
        except RayTaskError:  # an error of the replica's code
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLost(_first_line(error)) from error
        finally:
            stream.cancel()

    async def stats(self, replica: str) -> Mapping[str, float] | None:
        found: Mapping[str, float] | None = await self._handle.stats.remote(Route(only=replica))
        return found

    async def replace_all(self) -> None:
        # Ray Serve treats each deployment as a new version, and replaces the old replicas one after the other.
        await asyncio.to_thread(self._deploy)

    async def close(self) -> None:
        await asyncio.to_thread(self._delete)

    def _deploy(self) -> None:
        with self._deploying:
            if not self._is_closed:
                self._deploy_now()

    def _deploy_now(self) -> None:
        settings = self._settings
        num_cpus = num_replica_cpus(settings.num_cpus, settings.count.most)
        deployment = serve.deployment(
            EngineReplica,
            name="engine",
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options={"num_cpus": num_cpus},
            request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter),
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=settings.drain_s,
            max_constructor_retry_count=MAX_STARTS,
            **_scale(settings.count),
        )
        target = deployment.bind(
            dict(settings.engine),
            num_cpus=num_cpus,
            num_replicas=settings.count.most,
            log=settings.log,
        )
        # Clients connect to this server: Ray Serve's own HTTP proxy is off.
        serve.start(proxy_location="Disabled")
        logger = logging.getLogger("ray.serve")  # logs in our format, and no line for every lost request
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR)
        serve.run_many(
            [serve.RunTarget(target, name=self._name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _delete(self) -> None:
        with self._deploying:
            self._is_closed = True
            try:
                serve.delete(self._name, _blocking=False)
            except (RayError, RayServeException) as error:  # the cluster has ended, or Ray Serve has not started
                _log.debug("the replicas could not be ended: %s", error)
            finally:
                disconnect()

    async def _status(self) -> Any:
        return (await asyncio.to_thread(serve.status)).applications[self._name]


def _reason(status: Any) -> str:
    """Return the reason why the replicas cannot start, extracted from Ray Serve's messages."""
    text = "\n".join([status.message, *(one.message for one in status.deployments.values())])
    refusals = re.findall(r"ProcessRefused: (.+)", text)
    return refusals[-1] if refusals else text.strip()


def _scale(count: ReplicaCount) -> dict[str, Any]:
    if count.is_fixed:
        return {"num_replicas": count.least}
    limits = {"min_replicas": count.least, "max_replicas": count.most, "initial_replicas": count.least}
    return {"autoscaling_config": {**limits, "target_ongoing_requests": TARGET_ONGOING}}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
