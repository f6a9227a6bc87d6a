"""`--tp auto`: how many ranks this machine should have, by what it reads per second.

Decoding reads all weights for each token, so memory bandwidth is what ranks are for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tilewright.host.memory import available_bytes
from tilewright.host.topology import Topology
from tilewright.host.binding import RankBinding, plan_binding
from tilewright.parallel.launch import Workers, WorkerSpec

MIN_GAIN = 1.1  # of ranks over one process: less is lost again in their collectives
MEASURE_S = 1.0
SIZE_BYTES = 1 << 30  # that each process reads: over the caches of a socket
PROBE = f"{__name__}:probe"  # the entry point of the processes
TIMEOUT_S = 60.0  # of a process that loads torch on a busy machine

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredReads:
    """Bytes per second that one process reads, with its memory spread over all nodes, and all ranks at once."""

    alone: float
    ranks: list[float]


def choose_tp(
    topology: Topology,
    num_threads: int | None = None,
    measure: Callable[[Topology, Sequence[RankBinding]], MeasuredReads] | None = None,
) -> int:
    """The number of ranks for this machine: that of its memory nodes where these read faster than one process.

    `num_threads` is that of each rank (TILEWRIGHT_NUM_THREADS). One line of the log says why.
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
    """A process that measures died, or gave no result in time."""


def measure_reads(topology: Topology, ranks: Sequence[RankBinding]) -> MeasuredReads:
    """Measures one process, then one per rank at once. All are started together: loading torch takes the longest."""
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
        with contextlib.ExitStack() as theirs:
            start, self._start = os.pipe()
            theirs.callback(os.close, start)
            self._results = []
            specs = []
            for rank, binding in enumerate(bindings):
                result, result_end = os.pipe()
                self._results.append(result)
                theirs.callback(os.close, result_end)
                specs.append(WorkerSpec(rank, payload, (start, result_end), binding))
            self._workers = Workers(PROBE, specs, len(specs), on_death=self._note_death, may_finish=True)

    def wait_until_ready(self) -> None:
        for result in self._results:
            self._line(result)

    def measure(self) -> list[float]:
        os.close(self._start)
        self._start = -1
        return [json.loads(self._line(result)) for result in self._results]

    def close(self) -> None:
        self._workers.close()
        for fd in (self._start, *self._results):
            if fd >= 0:
                os.close(fd)

    def _line(self, fd: int) -> bytes:
        """The next line of a process."""
        line, deadline_s = b"", time.monotonic() + TIMEOUT_S
        while not line.endswith(b"\n"):
            if not select.select([fd], [], [], max(deadline_s - time.monotonic(), 0))[0]:
                raise MeasureError(f"no result in {TIMEOUT_S:g} s")
            data = os.read(fd, 4096)
            if not data:
                self._workers.wait(TIMEOUT_S)
                raise MeasureError(self._death or "a process ended without a result")
            line += data
        return line

    def _note_death(self, rank: int, reason: str) -> None:
        self._death = f"process {rank} {reason}"


def probe(rank: int, size: int, payload: dict[str, Any], fds: list[int]) -> None:
    """The entry point of a process that measures: it says that it is loaded, waits for the start, gives its rate."""
    from tilewright.ops.native import bind_team, kernels

    start, result = fds

    def read() -> float:
        if payload["interleave"]:
            kernels.set_memory_policy("interleave", payload["interleave"])
        bind_team()
        (rates,) = kernels.read_bandwidth(payload["size_bytes"], [kernels.num_threads()], payload["seconds"])
        return statistics.median(rates)

    os.write(result, b"\n")
    os.read(start, 1)  # returns when the parent closes the other end
    # A thread of its own has a team of its own, which starts with the memory policy that it sets first.
    with ThreadPoolExecutor(1) as executor:
        rate = executor.submit(read).result()
    os.write(result, f"{json.dumps(rate)}\n".encode())
