"""Made-up machines, as /sys/devices/system shows them."""

from pathlib import Path

from tilewright.config import format_cpus
from tilewright.host.topology import Topology, UsableNode

GIB = 1 << 30


def write_system(root: Path, nodes, *, sockets=None, siblings=(), offline=(), show_nodes=True) -> Path:
    """Writes the files of a machine under `root` and returns it.

    nodes     {number: (CPUs, bytes of memory)}
    sockets   {node: socket}; None: each node is one
    siblings  pairs of CPUs that are hyperthreads of one core; all others are cores of their own
    offline   CPUs that are there but off
    """
    partner = {cpu: pair for pair in siblings for cpu in pair}
    everything = sorted({cpu for cpus, _ in nodes.values() for cpu in cpus} | set(offline))
    online = [cpu for cpu in everything if cpu not in offline]
    cpu_root = root / "cpu"
    cpu_root.mkdir(parents=True)
    (cpu_root / "online").write_text(format_cpus(online) + "\n")
    (cpu_root / "cpufreq").mkdir()
    for number, (cpus, memory_bytes) in nodes.items():
        for cpu in cpus:
            folder = cpu_root / f"cpu{cpu}"
            (folder / "topology").mkdir(parents=True) if cpu not in offline else folder.mkdir()
            if cpu in offline:
                continue
            core = [other for other in partner.get(cpu, (cpu,)) if other not in offline]
            (folder / "topology" / "core_cpus_list").write_text(format_cpus(sorted(core)) + "\n")
            (folder / "topology" / "physical_package_id").write_text(f"{(sockets or {}).get(number, number)}\n")
        if show_nodes:
            folder = root / "node" / f"node{number}"
            folder.mkdir(parents=True)
            shown = [cpu for cpu in cpus if cpu not in offline]
            (folder / "cpulist").write_text(format_cpus(shown) + "\n")
            (folder / "meminfo").write_text(f"\nNode {number} MemTotal:   {memory_bytes >> 10} kB\n")
    return root


def two_sockets(nodes_per_socket, cores_per_node=8, cpu_quota=None):
    """A Topology of two sockets, without hyperthreads; nodes and CPUs are numbered through."""
    count = cores_per_node
    return Topology(
        tuple(
            UsableNode(
                number=node,
                socket=node // nodes_per_socket,
                cpus=tuple(range(node * count, (node + 1) * count)),
                cores=tuple(range(node * count, (node + 1) * count)),
                has_memory=True,
            )
            for node in range(2 * nodes_per_socket)
        ),
        cpu_quota,
    )
