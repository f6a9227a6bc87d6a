"""The memory nodes of the machine, and the cores that this process may use of each."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tilewright import config, control_group

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Cpu:
    """One CPU as the system numbers it: a core, or one of its hyperthreads."""

    number: int
    socket: int
    core: tuple[int, ...]  # the CPUs of its core, itself among them


@dataclass(frozen=True)
class Node:
    """One memory node."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int  # 0: CPUs without memory of their own, or the system does not tell


@dataclass(frozen=True)
class UsableNode:
    """What a process may use of a memory node."""

    number: int
    socket: int
    cpus: tuple[int, ...]
    cores: tuple[int, ...]  # one CPU of each core: the first that the process may use
    has_memory: bool


@dataclass(frozen=True)
class Topology:
    """What a process may use of a machine: nodes with at least one CPU, by number."""

    nodes: tuple[UsableNode, ...]
    cpu_quota: float | None = None  # CPUs' worth of time for all threads together; None: no bound

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for node in self.nodes for cpu in node.cpus))


def read_topology(usable_cpus: Collection[int] | None = None, system: Path = SYSTEM) -> Topology:
    """The Topology of this process: the CPUs that its config, its affinity and its control group leave it.

    `usable_cpus` replaces the CPUs of the config: that of the environment, since a bound rank has only its own. Where
    the system shows no nodes, as in some containers, there is one.
    """
    usable = set(config.from_environment().usable_cpus if usable_cpus is None else usable_cpus)
    if online := config.expand_ranges(read_text(system / "cpu" / "online")):
        usable &= set(online)
    cpus = read_cpus(system)
    nodes = [node for node in read_nodes(system) if usable & set(node.cpus)]
    return Topology(
        tuple(_usable_part(node, usable, cpus) for node in nodes or [Node(0, tuple(sorted(usable)), 0)]),
        control_group.cpu_quota(),
    )


def _usable_part(node: Node, usable: Collection[int], cpus: dict[int, Cpu]) -> UsableNode:
    numbers = [cpu for cpu in node.cpus if cpu in usable]
    first_of_core: dict[tuple[int, ...], int] = {}
    for number in numbers:
        first_of_core.setdefault(cpus[number].core if number in cpus else (number,), number)
    socket = cpus[numbers[0]].socket if numbers[0] in cpus else 0
    return UsableNode(node.number, socket, tuple(numbers), tuple(first_of_core.values()), node.memory_bytes > 0)


def read_cpus(system: Path = SYSTEM) -> dict[int, Cpu]:
    """All CPUs of the machine whose core the system tells, by number. Offline ones have none."""
    cpus = {}
    for folder in _numbered(system / "cpu", "cpu"):
        topology = folder / "topology"
        # The same list under its newer and its older name.
        core = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        if siblings := config.expand_ranges(core):
            socket = read_text(topology / "physical_package_id")
            number = int(folder.name[3:])
            # Some virtual machines on ARM say -1: not known.
            cpus[number] = Cpu(number, int(socket) if socket.isdecimal() else 0, tuple(siblings))
    return cpus


def read_nodes(system: Path = SYSTEM) -> list[Node]:
    """All memory nodes of the machine, by number; empty where the system shows none."""
    nodes = []
    for folder in _numbered(system / "node", "node"):
        total = re.search(r"MemTotal:\s*(\d+)", read_text(folder / "meminfo"))
        cpus = config.expand_ranges(read_text(folder / "cpulist")) or []
        nodes.append(Node(int(folder.name[4:]), tuple(cpus), int(total[1]) * 1024 if total else 0))
    return nodes


def read_text(path: Path) -> str:
    """The text of a file of /proc or /sys, "" where the system has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbered(folder: Path, name: str) -> list[Path]:
    """The entries name0, name1, ... of a folder, in the order of their numbers."""
    entries = [entry for entry in folder.glob(f"{name}[0-9]*") if entry.name[len(name) :].isdecimal()]
    return sorted(entries, key=lambda entry: int(entry.name[len(name) :]))
