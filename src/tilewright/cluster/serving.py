"""The replicas of a server as an application of Ray Serve, which starts, watches, scales and replaces them."""

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

from tilewright.cluster import connection, membership
from tilewright.cluster.replica import EngineReplica
from tilewright.cluster.request_router import PrefixRequestRouter
from tilewright.replica_flags import ReplicaCount
from tilewright.server.link.backend import EngineRequest, Event, ModelInfo
from tilewright.server.link.supervisor import EngineRefused
from tilewright.server.replicas.backend import ReplicaLost, Route

_log = logging.getLogger(__name__)

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
STATUS_PERIOD_S = 0.25
WAITING_LOG_S = 60.0  # between two lines that say what the start waits for, such as CPUs that others use
MAX_STARTS = 2  # of an engine that cannot start, before the server gives up
# The server in front limits how many requests there are (--max-queue): no replica refuses one.
MAX_ONGOING = 100_000
# With a range of replicas: one more is started when the mean is above it. An engine computes so many answers in one
# step at little more than the cost of one; beyond, each of them becomes slower.
TARGET_ONGOING = 8


@dataclasses.dataclass(frozen=True)
class ReplicaSettings:
    """What replicas are started with."""

    engine: Mapping[str, Any]  # the Engine's options
    count: ReplicaCount
    num_cpus: int | None  # of one replica; None: as many as all can have
    drain_s: float  # for a replica to finish its answers when it is replaced
    log_level: int
    log_is_json: bool


class RayReplicas:
    """Replicas on the cluster that this process is connected to."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        # Several servers may share a cluster.
        self._name = f"tilewright-{uuid.uuid4().hex[:8]}"
        self._handle: Any = None
        # `close` waits for a deployment that has begun: without a connection, Ray Serve would start another cluster.
        self._deploying = threading.Lock()
        self._is_closed = False

    @property
    def running(self) -> Sequence[str]:
        return membership.running

    async def start(self) -> ModelInfo:
        await asyncio.to_thread(self._deploy)
        next_log_s = time.monotonic() + WAITING_LOG_S
        while (found := await self._status()).status != ApplicationStatus.RUNNING:
            if found.status == ApplicationStatus.DEPLOY_FAILED:
                raise EngineRefused(_reason(found))
            if time.monotonic() > next_log_s:
                states = [dict(one.replica_states) for one in found.deployments.values()]
                _log.warning("the replicas are not ready yet, of which Ray Serve says %s", states)
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
        except RayTaskError:  # an error of our own code there
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLost(_first_line(error)) from error
        finally:
            stream.cancel()

    async def stats(self, replica: str) -> Mapping[str, float] | None:
        found: Mapping[str, float] | None = await self._handle.stats.remote(Route(only=replica))
        return found

    async def replace_all(self) -> None:
        # Ray Serve takes each deployment for a new version, and replaces the old one's replicas one after the other.
        await asyncio.to_thread(self._deploy)

    async def close(self) -> None:
        await asyncio.to_thread(self._delete)

    def _deploy(self) -> None:
        with self._deploying:
            if not self._is_closed:
                self._deploy_now()

    def _deploy_now(self) -> None:
        settings = self._settings
        num_cpus = connection.num_replica_cpus(settings.num_cpus, settings.count.most)
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
            log_level=settings.log_level,
            log_is_json=settings.log_is_json,
        )
        # Clients talk to our own server: Ray Serve's listens nowhere.
        serve.start(proxy_location="Disabled")
        logger = logging.getLogger("ray.serve")  # its lines in the form of ours, and no line for every lost request
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
            except (RayError, RayServeException) as error:  # the cluster has ended, or Ray Serve has not begun
                _log.debug("the replicas could not be ended: %s", error)
            finally:
                connection.disconnect()

    async def _status(self) -> Any:
        return (await asyncio.to_thread(serve.status)).applications[self._name]


def _reason(status: Any) -> str:
    """Why the replicas cannot start, of the text that Ray Serve has about it."""
    text = "\n".join([status.message, *(one.message for one in status.deployments.values())])
    refusals = re.findall(r"EngineRefused: (.+)", text)
    return refusals[-1] if refusals else text.strip()


def _scale(count: ReplicaCount) -> dict[str, Any]:
    if count.is_fixed:
        return {"num_replicas": count.least}
    limits = {"min_replicas": count.least, "max_replicas": count.most, "initial_replicas": count.least}
    return {"autoscaling_config": {**limits, "target_ongoing_requests": TARGET_ONGOING}}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
