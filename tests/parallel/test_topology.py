"""What a process may use of made-up machines."""

import pytest
from system_tree import GIB, write_system

from tilewright import config
from tilewright.host import topology as control_group
from tilewright.host.topology import read_cpus, read_nodes, read_topology


@pytest.fixture(autouse=True)
def no_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(control_group, "OWN_GROUP", tmp_path / "none")


@pytest.mark.parametrize("nodes_per_socket", [1, 2, 3])
def test_two_sockets_with_hyperthreads(tmp_path, nodes_per_socket):
    """Linux numbers the second hyperthreads after all first ones."""
    num_nodes = 2 * nodes_per_socket
    cores = {node: [4 * node + core for core in range(4)] for node in range(num_nodes)}
    second = 4 * num_nodes
    nodes = {node: (own + [second + core for core in own], GIB) for node, own in cores.items()}
    siblings = [(core, second + core) for own in cores.values() for core in own]
    sockets = {node: node // nodes_per_socket for node in cores}
    system = write_system(tmp_path, nodes, sockets=sockets, siblings=siblings)
    topology = read_topology(range(2 * second), system)
    assert [(node.number, node.socket) for node in topology.nodes] == list(sockets.items())
    assert [node.cores for node in topology.nodes] == [tuple(own) for own in cores.values()]
    assert [node.cpus for node in topology.nodes] == [tuple(cpus) for cpus, _ in nodes.values()]
    assert all(node.has_memory for node in topology.nodes)
    assert topology.cpus == tuple(range(2 * second)) and topology.cpu_quota is None


def test_hyperthreads_that_are_neighbours(tmp_path):
    system = write_system(tmp_path, {0: (range(8), GIB)}, siblings=[(0, 1), (2, 3), (4, 5), (6, 7)])
    assert read_topology(range(8), system).nodes[0].cores == (0, 2, 4, 6)


def test_a_core_of_which_only_the_second_hyperthread_may_be_used(tmp_path):
    system = write_system(tmp_path, {0: (range(8), GIB)}, siblings=[(0, 4), (1, 5), (2, 6), (3, 7)])
    assert read_topology([1, 4, 5, 7], system).nodes[0].cores == (1, 4, 7)


def test_nodes_without_memory_and_without_cpus(tmp_path):
    system = write_system(tmp_path, {0: (range(4), GIB), 1: (range(4, 8), 0), 2: ([], 64 * GIB)})
    topology = read_topology(range(8), system)
    assert [(node.number, node.has_memory) for node in topology.nodes] == [(0, True), (1, False)]
    assert [node.memory_bytes for node in read_nodes(system)] == [GIB, 0, 64 * GIB]


def test_nodes_of_which_the_process_may_use_no_cpu(tmp_path):
    system = write_system(tmp_path, {0: (range(4), GIB), 1: (range(4, 8), GIB)})
    topology = read_topology([5, 6], system)
    assert [(node.number, node.cpus) for node in topology.nodes] == [(1, (5, 6))]


@pytest.mark.parametrize("show_nodes", [True, False])
def test_offline_cpus_are_nobodys(tmp_path, show_nodes):
    system = write_system(
        tmp_path, {0: (range(8), GIB)}, siblings=[(0, 4), (1, 5)], offline=[4, 6], show_nodes=show_nodes
    )
    assert read_topology(range(8), system).nodes[0].cpus == (0, 1, 2, 3, 5, 7)
    assert read_topology(range(8), system).nodes[0].cores == (0, 1, 2, 3, 7)
    assert 4 not in read_cpus(system)


def test_no_nodes_are_one(tmp_path):
    system = write_system(
        tmp_path, {0: (range(4), GIB), 1: (range(4, 8), GIB)}, siblings=[(0, 1), (4, 5)], show_nodes=False
    )
    (node,) = read_topology(range(8), system).nodes
    assert (node.number, node.cores, node.has_memory) == (0, (0, 2, 3, 4, 6, 7), False)


def test_nothing_at_all_is_told(tmp_path):
    (node,) = read_topology([0, 3], tmp_path / "none").nodes
    assert (node.cpus, node.cores, node.socket) == ((0, 3), (0, 3), 0)


def test_ten_nodes_are_in_the_order_of_their_numbers(tmp_path):
    system = write_system(tmp_path, {node: ([node], GIB) for node in range(12)})
    assert [node.number for node in read_topology(range(12), system).nodes] == list(range(12))


def test_a_socket_that_is_not_known(tmp_path):
    system = write_system(tmp_path, {0: (range(2), GIB)}, sockets={0: -1})
    assert read_topology(range(2), system).nodes[0].socket == 0


def test_the_process_has_the_cpus_of_its_environment(monkeypatch, tmp_path):
    """TILEWRIGHT_BIND is as if the process had only those, also when a rank's settings are in their place."""
    system = write_system(tmp_path, {0: (range(4), GIB), 1: (range(4, 8), GIB)})
    settings = config.resolve({"TILEWRIGHT_BIND": "6,1-2"}, range(8))
    monkeypatch.setattr(config, "from_environment", lambda: settings)
    assert [node.cpus for node in read_topology(system=system).nodes] == [(1, 2), (6,)]
    config.use(config.resolve({"TILEWRIGHT_BIND": "1"}, range(8)))
    try:
        assert read_topology(system=system).cpus == (1, 2, 6)
    finally:
        config.use(None)


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/outer/inner\n", {"outer/inner/cpu.max": "max 100000", "outer/cpu.max": "150000 100000"}, 1.5),
        ("0::/outer/inner\n", {"outer/inner/cpu.max": "800000 100000", "outer/cpu.max": "200000 100000"}, 2.0),
        ("4:memory:/x\n1:cpu,cpuacct:/tiles\n", {"cpu/tiles/cpu.cfs_quota_us": "-1"}, None),
        ("1:cpuacct,cpu:/tiles\n", {"cpu/tiles/cpu.cfs_quota_us": "350000"}, 3.5),
        ("1:cpuset:/tiles\n", {"cpu/tiles/cpu.cfs_quota_us": "350000"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_quota_of_the_control_group(monkeypatch, tmp_path, own, files, quota):
    monkeypatch.setattr(control_group, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(control_group, "GROUPS", tmp_path / "groups")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if "cfs" in name:
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert control_group.cpu_quota() == quota
    assert read_topology([0], tmp_path).cpu_quota == quota
