"""Assigns CPUs, memory nodes and threads to ranks. docs/parallel.md has the reasons.

plan = plan_binding(read_topology(), size=2)
claim_cpus(plan.ranks[1])       # in the process of rank 1, before torch is loaded
apply_binding(plan.ranks[0])    # of ops/native.py, in a process whose kernels may have run
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright import config
from tilewright.config import ConfigError, format_cpus, name_cpus
from tilewright.host.topology import Topology, UsableNode, read_topology

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankBinding:
    """The CPUs of one rank, to which its threads are pinned in this order, and its memory nodes."""

    rank: int
    cpus: tuple[int, ...]
    memory_nodes: tuple[int, ...]  # empty: the system chooses
    num_threads: int

    def __str__(self) -> str:
        nodes = f" of {_name('node', self.memory_nodes)}" if self.memory_nodes else ""
        return f"rank {self.rank}: {name_cpus(self.cpus)}{nodes}, {_count(self.num_threads, 'thread')}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RankBinding:
        return RankBinding(fields["rank"], tuple(fields["cpus"]), tuple(fields["memory_nodes"]), fields["num_threads"])


@dataclass(frozen=True)
class RankBindings:
    """The binding of every rank, with warnings for the user."""

    ranks: list[RankBinding]
    warnings: list[str]


def binding_of_ranks(size: int, cpu_binding: str | None = None) -> list[RankBinding] | None:
    """Return the binding of each of `size` ranks on this machine from the flags and the environment, and log it.

    None for one rank without --cpu-binding, which only TILEWRIGHT_BIND binds.
    """
    if size == 1 and not cpu_binding:
        return None
    plan = plan_binding(read_topology(), size, cpu_binding, config.from_environment().num_threads)
    for warning in plan.warnings:
        _log.warning("%s", warning)
    _log.info("%s", "; ".join(map(str, plan.ranks)))
    return plan.ranks


def plan_binding(
    topology: Topology, size: int, cpu_binding: str | None = None, num_threads: int | None = None
) -> RankBindings:
    """Return the binding of each of `size` ranks: to the lists of `cpu_binding`, else to one memory node each.

    `num_threads` is the number of each rank; None: one per CPU of its binding, within the control group's quota.
    """
    warnings: list[str] = []
    if cpu_binding:
        cpus = _parse_lists(cpu_binding, size, topology.cpus)
    else:
        cpus, warnings = _assign_cores(topology, size)
    threads, thread_warnings = _count_threads(cpus, num_threads, topology.cpu_quota)
    ranks = [
        RankBinding(rank, rank_cpus, _memory_nodes(topology, rank_cpus), num_threads)
        for rank, (rank_cpus, num_threads) in enumerate(zip(cpus, threads, strict=True))
    ]
    return RankBindings(ranks, warnings + thread_warnings)


def _parse_lists(text: str, size: int, usable_cpus: Sequence[int]) -> list[tuple[int, ...]]:
    parts = text.split("|")
    if len(parts) != size:
        raise ConfigError(
            f"--cpu-binding is {text!r}, which has {_count(len(parts), 'list')} of CPUs for {_count(size, 'rank')}: "
            "expected one for each rank, separated by |"
        )
    lists: list[tuple[int, ...]] = []
    for rank, part in enumerate(parts):
        cpus = config.parse_cpus(f"--cpu-binding of rank {rank}", part.strip(), usable_cpus)
        if not cpus:
            raise ConfigError(f"--cpu-binding is {text!r}, which names no CPU for rank {rank}")
        for other, other_cpus in enumerate(lists):
            if shared := sorted(set(cpus) & set(other_cpus)):
                raise ConfigError(
                    f"--cpu-binding is {text!r}, where ranks {other} and {rank} both have {name_cpus(shared)}"
                )
        lists.append(cpus)
    return lists


def _assign_cores(topology: Topology, size: int) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the CPUs of each rank, one per core, and the warnings about them."""
    nodes = _by_socket(topology.nodes, size)
    warnings = []
    if left_out := sorted(node.number for node in nodes[size:]):
        warnings.append(
            f"{_count(size, 'rank')} on {len(nodes)} memory nodes: {_name('node', left_out)} and "
            f"{'its' if len(left_out) == 1 else 'their'} cores are not used; --tp {len(nodes)} would use all"
        )
    nodes = nodes[:size]
    parts: list[tuple[int, ...]] = []
    for node, num_ranks in zip(nodes, _ranks_per_node(nodes, size), strict=True):
        if num_ranks > 1:
            ranks = range(len(parts), len(parts) + num_ranks)
            warnings.append(f"ranks {format_cpus(ranks)} share memory node {node.number}: {_how_shared(node, ranks)}")
        parts += _cut(node.cores, num_ranks)
    return parts, warnings


def _by_socket(nodes: Sequence[UsableNode], size: int) -> list[UsableNode]:
    """Return the nodes in the order of ranks: first those of a socket that has one for every rank."""

    def key(node: UsableNode) -> tuple[bool, int, int]:
        is_enough = sum(other.socket == node.socket for other in nodes) >= size
        return not is_enough, node.socket, node.number

    return sorted(nodes, key=key)


def _ranks_per_node(nodes: Sequence[UsableNode], size: int) -> list[int]:
    """Return the number of ranks of each node: each further rank goes where it has the most cores."""
    counts = [1] * len(nodes)
    for _ in range(size - len(nodes)):
        roomiest = max(range(len(nodes)), key=lambda i: len(nodes[i].cores) / (counts[i] + 1))
        counts[roomiest] += 1
    return counts


def _cut(cores: tuple[int, ...], num_parts: int) -> list[tuple[int, ...]]:
    """Return equal parts of adjacent cores: ranks wait for the slowest, so that extra cores for some would not help."""
    length = len(cores) // num_parts
    if length == 0:
        return [(cores[part * len(cores) // num_parts],) for part in range(num_parts)]
    return [cores[part * length : (part + 1) * length] for part in range(num_parts)]


def _how_shared(node: UsableNode, ranks: range) -> str:
    num_cores = len(node.cores)
    if num_cores < len(ranks):
        return f"it has {_count(num_cores, 'core')}, so that ranks wait for each other's turn on them"
    return f"{_count(num_cores // len(ranks), 'core')} for each of {len(ranks)}"


def _count_threads(
    cpus: Sequence[tuple[int, ...]], num_threads: int | None, cpu_quota: float | None
) -> tuple[list[int], list[str]]:
    """Return the number of threads of each rank, and the warnings about them."""
    size, warnings = len(cpus), []
    if num_threads is not None:
        threads = [num_threads] * size
        if crowded := [rank for rank in range(size) if num_threads > len(cpus[rank])]:
            fewest = min(len(cpus[rank]) for rank in crowded)
            warnings.append(
                f"TILEWRIGHT_NUM_THREADS is {num_threads} for each rank, but {_name('rank', crowded)} "
                f"{'has' if len(crowded) == 1 else 'have'} {_count(fewest, 'CPU')}: threads share "
                f"{'it' if fewest == 1 else 'them'}, which is slow"
            )
        if cpu_quota is not None and sum(threads) > max(cpu_quota, size):
            warnings.append(
                f"the control group allows the time of {cpu_quota:g} CPUs, but TILEWRIGHT_NUM_THREADS asks for "
                f"{sum(threads)} threads on {_count(size, 'rank')}: they will be throttled"
            )
        return threads, warnings
    threads = [len(rank_cpus) for rank_cpus in cpus]
    if cpu_quota is not None and sum(threads) > cpu_quota:
        most = max(1, int(cpu_quota / size))
        warnings.append(
            f"the control group allows the time of {cpu_quota:g} CPUs: {_count(most, 'thread')} on each of "
            f"{_count(size, 'rank')} instead of {max(threads)}"
        )
        threads = [min(most, count) for count in threads]
    return threads, warnings


def _memory_nodes(topology: Topology, cpus: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of these CPUs that have memory; if none, the system's choice, the nearest, is best."""
    return tuple(node.number for node in topology.nodes if node.has_memory and set(cpus) & set(node.cpus))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _name(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) != 1)} {format_cpus(numbers)}"


def claim_cpus(binding: RankBinding) -> None:
    """Set the CPUs and threads of this process, before torch and the kernels are loaded.

    libgomp counts the CPUs when it is loaded; `ops.native` reads the config, pins the team and sets the memory nodes.
    """
    settings = dataclasses.replace(
        config.current(),
        bind_cpus=binding.cpus,
        num_threads=binding.num_threads,
        memory_nodes=binding.memory_nodes,
    )
    try:
        os.sched_setaffinity(0, binding.cpus)
    except OSError as error:
        _log.warning("rank %d is not bound to %s: %s", binding.rank, name_cpus(binding.cpus), error.strerror)
    config.use(settings)
