"""The CPUs of this process: their name, cores and NUMA nodes, and the quota of its control group."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright import config

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def values_of(controller: str, files: tuple[str, ...], old_files: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of a controller's files in this process's group and its parents, if a group has all of them.

    `files` are their names in cgroup version 2, `old_files` in version 1. A service's limit is set in its own group; a
    container sees its own group as the root.
    """
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        names, root = files, GROUPS
        if number != "0":
            if controller not in controllers.split(","):
                continue
            names, root = old_files, GROUPS / controller
        group = Path(path)
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                yield tuple(Path(f"{root}{folder}", name).read_text().strip() for name in names)


def cpu_quota() -> float | None:
    """Return the CPU time per second that the process may use, such as 3.5 on any of 64 CPUs; None: no limit."""
    quotas = []
    for texts in values_of("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        quota, period = " ".join(texts).split()  # cpu.max has both in one line; no limit is "max" there, or -1
        if quota.isdecimal() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


# ARM CPUs have no "model name" but numbers of the core's maker and the core. They do not identify a product:
# Neoverse-N1 is in Graviton2 and in Ampere Altra, Neoverse-V2 in Graviton4 and in NVIDIA Grace.
_ARM_CORES: dict[int, tuple[str, dict[int, str]]] = {
    0x41: (
        "Arm",
        {
            0xD03: "Cortex-A53", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73",
            0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE",
            0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE", 0xD4B: "Cortex-A78C",
            0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD4D: "Cortex-A715",
            0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD87: "Cortex-A725",
            0xD44: "Cortex-X1", 0xD4C: "Cortex-X1C", 0xD48: "Cortex-X2", 0xD4E: "Cortex-X3", 0xD82: "Cortex-X4",
            0xD85: "Cortex-X925",
            0xD4A: "Neoverse-E1", 0xD0C: "Neoverse-N1", 0xD49: "Neoverse-N2", 0xD8E: "Neoverse-N3",
            0xD40: "Neoverse-V1", 0xD4F: "Neoverse-V2", 0xD84: "Neoverse-V3", 0xD83: "Neoverse-V3AE",
        },
    ),
    0x46: ("Fujitsu", {0x001: "A64FX"}),
    0x48: ("HiSilicon", {0xD01: "TaiShan v110 (Kunpeng 920)"}),
    0x4E: ("NVIDIA", {0x004: "Carmel"}),
    0x51: ("Qualcomm", {0x001: "Oryon", 0xC00: "Falkor"}),
    0x61: (
        "Apple",
        {
            0x022: "M1 Icestorm", 0x023: "M1 Firestorm", 0x024: "M1 Pro Icestorm", 0x025: "M1 Pro Firestorm",
            0x028: "M1 Max Icestorm", 0x029: "M1 Max Firestorm", 0x032: "M2 Blizzard", 0x033: "M2 Avalanche",
            0x034: "M2 Pro Blizzard", 0x035: "M2 Pro Avalanche", 0x038: "M2 Max Blizzard", 0x039: "M2 Max Avalanche",
            0x048: "M3 Max Sawtooth", 0x049: "M3 Max Everest",
        },
    ),
    0x6D: ("Microsoft", {0xD49: "Cobalt 100"}),
    0xC0: ("Ampere Computing", {0xAC3: "Ampere-1", 0xAC4: "Ampere-1A"}),
}  # fmt: skip


def cpu_name(cpuinfo: str) -> str:
    """Return the name of the CPU, with all its kinds of cores if there are several; "" if the text has none."""
    cores = Counter(filter(None, map(_arm_core, cpuinfo.split("\n\n"))))
    if not cores:
        return _field("model name", cpuinfo)
    if len(cores) == 1:
        return next(iter(cores))
    return ", ".join(f"{count} x {name}" for name, count in cores.items())


def _arm_core(cpu: str) -> str:
    """Return the ARM core that one CPU's lines name; "" for other CPUs."""
    implementer, part = (_field(name, cpu) for name in ("CPU implementer", "CPU part"))
    if not implementer or not part:
        return ""
    maker, cores = _ARM_CORES.get(int(implementer, 16), ("", {}))
    core = cores.get(int(part, 16))
    return f"{maker} {core}" if core else f"implementer {implementer}, part {part}"


def _field(name: str, text: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Cpu:
    """A CPU by the system's number: a core, or one of its hyperthreads."""

    number: int
    socket: int
    core: tuple[int, ...]  # all CPUs of its core, itself included


@dataclass(frozen=True)
class Node:
    """A memory node."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int  # 0: CPUs without memory of their own, or unknown


@dataclass(frozen=True)
class UsableNode:
    """The part of a memory node that a process may use."""

    number: int
    socket: int
    cpus: tuple[int, ...]
    cores: tuple[int, ...]  # one CPU of each core: the first that the process may use
    has_memory: bool


@dataclass(frozen=True)
class Topology:
    """The part of a machine that a process may use: nodes with at least one CPU, by number."""

    nodes: tuple[UsableNode, ...]
    cpu_quota: float | None = None  # CPUs' time for all threads together; None: no limit

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for node in self.nodes for cpu in node.cpus))


def read_topology(usable_cpus: Collection[int] | None = None, system: Path = SYSTEM) -> Topology:
    """Return the Topology of this process: the CPUs that its config, its affinity and its control group allow.

    `usable_cpus` replaces the CPUs of the environment's config (a bound rank's own config has only its CPUs). If the
    system shows no nodes, as in some containers, there is one.
    """
    usable = set(config.from_environment().usable_cpus if usable_cpus is None else usable_cpus)
    if online := config.expand_ranges(read_text(system / "cpu" / "online")):
        usable &= set(online)
    cpus = read_cpus(system)
    nodes = [node for node in read_nodes(system) if usable & set(node.cpus)]
    return Topology(
        tuple(_usable_part(node, usable, cpus) for node in nodes or [Node(0, tuple(sorted(usable)), 0)]),
        cpu_quota(),
    )


def _usable_part(node: Node, usable: Collection[int], cpus: dict[int, Cpu]) -> UsableNode:
    numbers = [cpu for cpu in node.cpus if cpu in usable]
    first_of_core: dict[tuple[int, ...], int] = {}
    for number in numbers:
        first_of_core.setdefault(cpus[number].core if number in cpus else (number,), number)
    socket = cpus[numbers[0]].socket if numbers[0] in cpus else 0
    return UsableNode(node.number, socket, tuple(numbers), tuple(first_of_core.values()), node.memory_bytes > 0)


def read_cpus(system: Path = SYSTEM) -> dict[int, Cpu]:
    """Return all CPUs of the machine whose core is known, by number; offline CPUs have none."""
    cpus = {}
    for folder in _numbered(system / "cpu", "cpu"):
        topology = folder / "topology"
        # The same list under its new and its old name.
        core = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        if siblings := config.expand_ranges(core):
            socket = read_text(topology / "physical_package_id")
            number = int(folder.name[3:])
            # Some virtual machines on ARM have -1: unknown.
            cpus[number] = Cpu(number, int(socket) if socket.isdecimal() else 0, tuple(siblings))
    return cpus


def read_nodes(system: Path = SYSTEM) -> list[Node]:
    """Return all memory nodes of the machine, by number; none if the system shows none."""
    nodes = []
    for folder in _numbered(system / "node", "node"):
        total = re.search(r"MemTotal:\s*(\d+)", read_text(folder / "meminfo"))
        cpus = config.expand_ranges(read_text(folder / "cpulist")) or []
        nodes.append(Node(int(folder.name[4:]), tuple(cpus), int(total[1]) * 1024 if total else 0))
    return nodes


def read_text(path: Path) -> str:
    """Return the text of a file of /proc or /sys; "" if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbered(folder: Path, name: str) -> list[Path]:
    """Return the entries name0, name1, ... of a folder, in the order of their numbers."""
    entries = [entry for entry in folder.glob(f"{name}[0-9]*") if entry.name[len(name) :].isdecimal()]
    return sorted(entries, key=lambda entry: int(entry.name[len(name) :]))
