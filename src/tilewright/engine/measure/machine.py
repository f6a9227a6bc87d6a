"""Describes and measures this machine: CPU, memory, kernels, bandwidth and peaks, for `tilewright info`."""

import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from tilewright import __version__, config
from tilewright.host import topology
from tilewright.host.binding import RankBinding, plan_binding
from tilewright.host.memory import available_bytes, total_bytes
from tilewright.host.topology import cpu_name, read_text
from tilewright.ops import backend
from tilewright.ops.native import kernels, read_build

CPUINFO = Path("/proc/cpuinfo")
SYSTEM = topology.SYSTEM
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NUM_TURNS = 5  # of each multiply type, when measuring


@dataclass(frozen=True)
class Cache:
    """One cache as CPU 0 sees it."""

    level: int
    kind: str  # Data, Instruction, Unified
    size_bytes: int
    shared_by_cpus: str


@dataclass(frozen=True)
class NumaNode:
    """One memory node and its CPUs."""

    node: int
    cpus: str
    memory_bytes: int


@dataclass(frozen=True)
class Kernel:
    """The kernel that an op uses, and all it has, best first."""

    name: str
    isa: str
    all_names: list[str]


@dataclass(frozen=True)
class Machine:
    """The output of `tilewright info`. Sizes in bytes; 0 or empty if the system does not report it."""

    version: str
    cpu_model: str
    isa_found: list[str]
    isa_compiled: str  # "every ISA level", or which and why
    isa_cap: str | None
    isa_in_use: str
    num_sockets: int
    num_cores: int
    num_cpus: int
    process_cpus: str
    num_threads: int
    bind_cpus: str
    numa_nodes: list[NumaNode]
    node_binding: list[RankBinding]  # binding of one rank per node that the process may use; empty with one node
    memory_bytes: int
    memory_available_bytes: int
    transparent_huge_pages: str
    caches: list[Cache]
    backends: list[str]  # the default first
    kernels: dict[str, Kernel]  # of the native backend


@dataclass(frozen=True)
class MeasuredMachine:
    """Speed of this machine: the maximum of many short passes, and the median of reads to show how steady it is.

    GB/s and TFLOP/s are powers of ten; a multiply-add is two operations. All threads of the config, except
    `..._one_thread`.
    """

    read_gb_s: float
    read_gb_s_median: float
    read_gb_s_one_thread: float
    bf16_tflops: float
    int8_tops: float
    fp32_tflops: float


def describe() -> Machine:
    """Return the Machine this process runs on, with the settings it was started with."""
    settings = config.current()
    cpus = topology.read_cpus(SYSTEM).values()
    return Machine(
        version=__version__,
        cpu_model=cpu_name(read_text(CPUINFO)) or platform.processor() or "unknown",
        isa_found=kernels.isa_levels(),
        isa_compiled=str(read_build()),
        isa_cap=settings.max_isa,
        isa_in_use=kernels.active_isa(),
        num_sockets=len({cpu.socket for cpu in cpus}) or 1,
        num_cores=len({cpu.core for cpu in cpus}) or os.cpu_count() or 1,
        num_cpus=os.cpu_count() or 1,
        process_cpus=config.format_cpus(settings.available_cpus),
        num_threads=kernels.num_threads(),
        bind_cpus=config.format_cpus(settings.bind_cpus),
        numa_nodes=_numa_nodes(),
        node_binding=_node_binding(),
        memory_bytes=total_bytes(),
        memory_available_bytes=available_bytes(),
        transparent_huge_pages=_first_match(r"\[(\w+)\]", read_text(HUGE_PAGES)) or "unknown",
        caches=_caches(),
        backends=list(backend.NAMES),
        kernels=chosen_kernels(),
    )


def chosen_kernels() -> dict[str, Kernel]:
    """Return for each op the first kernel of its manifest whose ISA level may be used."""
    chosen = {}
    for op, entries in kernels.manifest().items():
        isa, name = next(entry for entry in entries if kernels.may_use_isa(entry[0]))
        chosen[op] = Kernel(name, isa, [entry_name for _, entry_name in entries])
    return chosen


def measure(seconds: float = 2.0) -> MeasuredMachine:
    """Return read bandwidth and multiply peaks, measured for about `seconds` after the buffer is filled."""
    num_threads = kernels.num_threads()
    # Far larger than the caches if memory allows; a quarter of the free memory leaves room for other programs.
    size_bytes = min(1 << 30, available_bytes() // 4)
    reads, reads_one_thread = kernels.read_bandwidth(size_bytes, [num_threads, 1], seconds * 0.4)

    # Types take turns, so that a burst of another program's load does not fall on one type alone.
    peaks = dict.fromkeys(("bf16", "int8", "fp32"), 0.0)
    for type in list(peaks) * NUM_TURNS:
        rates = kernels.multiply_peak(type, num_threads, seconds * 0.2 / NUM_TURNS)
        peaks[type] = max(peaks[type], *rates)
    return MeasuredMachine(
        read_gb_s=max(reads) / 1e9,
        read_gb_s_median=statistics.median(reads) / 1e9,
        read_gb_s_one_thread=max(reads_one_thread) / 1e9,
        bf16_tflops=peaks["bf16"] / 1e12,
        int8_tops=peaks["int8"] / 1e12,
        fp32_tflops=peaks["fp32"] / 1e12,
    )


def as_dict(machine: Machine, measured: MeasuredMachine | None = None) -> dict[str, object]:
    """Return the machine as plain JSON types, with the measurement under "measured"."""
    return asdict(machine) | ({"measured": asdict(measured)} if measured else {})


def as_text(machine: Machine, measured: MeasuredMachine | None = None) -> str:
    """Return the machine as text for people."""
    cap = f", capped at {machine.isa_cap} by TILEWRIGHT_MAX_ISA" if machine.isa_cap else ""
    pinned = f", pinned to CPUs {machine.bind_cpus}" if machine.bind_cpus else ""
    caches = [f"L{c.level} {c.kind.lower()} {_size(c.size_bytes)} (CPUs {c.shared_by_cpus})" for c in machine.caches]
    nodes = [f"node {n.node}: CPUs {n.cpus}, {_size(n.memory_bytes)}" for n in machine.numa_nodes]
    rows = [
        ("tilewright", machine.version),
        ("CPU", machine.cpu_model),
        ("ISA levels", f"{', '.join(machine.isa_found)}; in use: {machine.isa_in_use}{cap}"),
        ("compiled", machine.isa_compiled),
        ("cores", f"{machine.num_cpus} CPUs, cores: {machine.num_cores}, sockets: {machine.num_sockets}"),
        ("threads", f"{machine.num_threads} of CPUs {machine.process_cpus}{pinned}"),
        ("caches", "; ".join(caches) or "unknown"),
        ("memory", f"{_size(machine.memory_bytes)}, {_size(machine.memory_available_bytes)} available"),
        ("NUMA", "; ".join(nodes) or "one node"),
        *((f"--tp {len(machine.node_binding)}", str(rank)) for rank in machine.node_binding),
        ("huge pages", machine.transparent_huge_pages),
        ("backends", f"{', '.join(machine.backends)}; --backend chooses, {machine.backends[0]} unless told"),
        *((f"op {op}", kernel.name) for op, kernel in machine.kernels.items()),
    ]
    if measured:
        rows += [
            (
                "read",
                f"{measured.read_gb_s:.1f} GB/s, median {measured.read_gb_s_median:.1f}, "
                f"one thread {measured.read_gb_s_one_thread:.1f}",
            ),
            ("bf16", f"{measured.bf16_tflops:.2f} TFLOP/s"),
            ("int8", f"{measured.int8_tops:.2f} TOP/s"),
            ("fp32", f"{measured.fp32_tflops:.2f} TFLOP/s"),
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""


def _numa_nodes() -> list[NumaNode]:
    nodes = topology.read_nodes(SYSTEM)
    return [NumaNode(node.number, config.format_cpus(node.cpus), node.memory_bytes) for node in nodes]


def _node_binding() -> list[RankBinding]:
    usable = topology.read_topology(system=SYSTEM)
    size = len(usable.nodes)
    return plan_binding(usable, size, num_threads=config.current().num_threads).ranks if size > 1 else []


def _caches() -> list[Cache]:
    caches = []
    for folder in sorted((SYSTEM / "cpu/cpu0/cache").glob("index[0-9]*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", read_text(folder / "size"))
        if size:
            size_bytes = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
            level, kind = int(read_text(folder / "level") or 0), read_text(folder / "type")
            caches.append(Cache(level, kind, size_bytes, read_text(folder / "shared_cpu_list")))
    return caches


def _size(size_bytes: int) -> str:
    """Return the size in the largest binary unit of which it has at least one: "48 KiB", "23.5 GiB"."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.4g} {unit}"
    return f"{size_bytes} B"
