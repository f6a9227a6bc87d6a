"""`--tp auto`: chooses the number of ranks for this machine by its measured read bandwidth.

Decoding reads all weights for each token, so ranks pay off through memory bandwidth.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tilewright.host.binding import RankBinding, plan_binding
from tilewright.host.memory import available_bytes
from tilewright.host.topology import Topology
from tilewright.process.frames import Channel, until
from tilewright.process.workers import Workers, WorkerSpec

MIN_GAIN = 1.1  # of ranks over one process: collectives take a part of the gain
MEASURE_S = 1.0
SIZE_BYTES = 1 << 30  # read by each process: larger than the caches of a socket
PROBE = f"{__name__}:probe"  # the entry point of the processes
TIMEOUT_S = 60.0  # for a process that loads torch on a busy machine

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredReads:
    """Bytes per second read by one process with its memory spread over all nodes, and by all ranks at once."""

    alone: float
    ranks: list[float]


def choose_tp(
    topology: Topology,
    num_threads: int | None = None,
    measure: Callable[[Topology, Sequence[RankBinding]], MeasuredReads] | None = None,
) -> int:
    """Return the number of ranks for this machine: that of its memory nodes if they read faster than one process.

    `num_threads` is that of each rank (TILEWRIGHT_NUM_THREADS). The reason is logged in one line.
    """
    size = len(topology.nodes)
    if size == 1:
        _log.info("tp auto: 1, as this process may use one memory node")
        return 1
    try:
        reads = (measure or measure_reads)(topology, plan_binding(topology, size, num_threads=num_threads).ranks)
    except MeasureError as error:
        _log.warning("tp auto: %d, one rank per memory node; what they read was not measured: %s", size, error)
        return size
    together = sum(reads.ranks)
    is_worth = together >= MIN_GAIN * reads.alone
    _log.info(
        "tp auto: %d of %d memory nodes: one rank per node reads %s = %.1f GB/s, one process on all nodes %.1f GB/s; "
        "ranks must read %.1f times as fast",
        size if is_worth else 1,
        size,
        " + ".join(f"{rate / 1e9:.1f}" for rate in reads.ranks),
        together / 1e9,
        reads.alone / 1e9,
        MIN_GAIN,
    )
    return size if is_worth else 1


class MeasureError(Exception):
    """A measuring process died, or gave no result in time."""


def measure_reads(topology: Topology, ranks: Sequence[RankBinding]) -> MeasuredReads:
    """Measure one process, then one per rank at once. All are started together: loading torch takes the longest."""
    nodes = [node.number for node in topology.nodes if node.has_memory]
    payload = {"size_bytes": min(SIZE_BYTES, available_bytes() // (4 * len(ranks))), "seconds": MEASURE_S}
    with (
        contextlib.closing(_Probes([None], payload | {"interleave": nodes})) as alone,
        contextlib.closing(_Probes(ranks, payload | {"interleave": []})) as together,
    ):
        alone.wait_until_ready()
        together.wait_until_ready()
        (rate,) = alone.measure()
        return MeasuredReads(rate, together.measure())


class _Probes:
    """Processes that wait for each other before they measure."""

    def __init__(self, bindings: Sequence[RankBinding | None], payload: dict[str, Any]) -> None:
        self._death: str | None = None
        specs = [WorkerSpec(rank, payload, binding=binding) for rank, binding in enumerate(bindings)]
        self._workers = Workers(PROBE, specs, len(specs), on_death=self._on_rank_death, may_finish=True)

    def wait_until_ready(self) -> None:
        for channel in self._workers.channels.values():
            self._receive(channel)

    def measure(self) -> list[float]:
        channels = self._workers.channels.values()
        for channel in channels:
            with contextlib.suppress(OSError):  # it has ended, which is noticed below
                channel.send({"start": True})
        return [self._receive(channel)["bytes_per_s"] for channel in channels]

    def close(self) -> None:
        self._workers.close()

    def _receive(self, channel: Channel) -> dict[str, Any]:
        try:
            message = channel.receive(until(TIMEOUT_S))
        except TimeoutError as error:
            raise MeasureError(f"no result in {TIMEOUT_S:g} s") from error
        if message is None:
            self._workers.wait(TIMEOUT_S)
            raise MeasureError(self._death or "a process ended without a result")
        return message

    def _on_rank_death(self, rank: int, reason: str) -> None:
        self._death = f"process {rank} {reason}"


def probe(channel: Channel, rank: int, size: int, payload: dict[str, Any], fds: list[int]) -> None:
    """Run a measuring process: report that it is loaded, wait for the start, report its rate."""
    from tilewright.ops.native import bind_team, kernels

    def read() -> float:
        if payload["interleave"]:
            kernels.set_memory_policy("interleave", payload["interleave"])
        bind_team()
        (rates,) = kernels.read_bandwidth(payload["size_bytes"], [kernels.num_threads()], payload["seconds"])
        return statistics.median(rates)

    channel.send({"loaded": True})
    if channel.receive() is None:
        return
    # A new thread has its own team, which starts with the memory policy that the thread sets first.
    with ThreadPoolExecutor(1) as executor:
        channel.send({"bytes_per_s": executor.submit(read).result()})
