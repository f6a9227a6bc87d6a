"""Which rank gets which CPUs, memory and threads, on made-up machines."""

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_tree import GIB, two_sockets, write_system

from tilewright import config
from tilewright.config import ConfigError
from tilewright.host import binding as binding_module
from tilewright.host.binding import RankBinding, binding_of_ranks, plan_binding
from tilewright.host.topology import Topology, UsableNode, read_topology


def cpus_of(plan):
    return [rank.cpus for rank in plan.ranks]


@pytest.mark.parametrize("nodes_per_socket", [1, 2, 3])
def test_a_rank_per_node(nodes_per_socket):
    size = 2 * nodes_per_socket
    plan = plan_binding(two_sockets(nodes_per_socket), size)
    assert plan.warnings == []
    assert plan.ranks == [
        RankBinding(rank, tuple(range(8 * rank, 8 * rank + 8)), (rank,), num_threads=8) for rank in range(size)
    ]


def test_one_thread_per_core(tmp_path):
    nodes = {0: ([0, 1, 4, 5], GIB), 1: ([2, 3, 6, 7], GIB)}
    system = write_system(tmp_path, nodes, siblings=[(0, 4), (1, 5), (2, 6), (3, 7)])
    plan = plan_binding(read_topology(range(8), system), 2)
    assert cpus_of(plan) == [(0, 1), (2, 3)]
    assert [rank.num_threads for rank in plan.ranks] == [2, 2]


def test_fewer_ranks_than_nodes_leave_nodes_out():
    plan = plan_binding(two_sockets(2), 3)
    assert [rank.memory_nodes for rank in plan.ranks] == [(0,), (1,), (2,)]
    assert plan.warnings == [
        "3 ranks on 4 memory nodes: node 3 and its cores are not used; --tp 4 would use all",
    ]
    assert "nodes 1-5 and their cores" in plan_binding(two_sockets(3), 1).warnings[0]


def nodes_of_sockets(*sockets):
    return Topology(
        tuple(UsableNode(number, socket, (number,), (number,), True) for number, socket in enumerate(sockets))
    )


def test_nodes_of_one_socket_are_taken_first():
    """Also where the system numbers the nodes of two sockets in turn."""
    plan = plan_binding(nodes_of_sockets(0, 1, 0, 1), 2)
    assert [rank.memory_nodes for rank in plan.ranks] == [(0,), (2,)]
    assert "nodes 1,3 " in plan.warnings[0]


def test_a_socket_with_room_for_all_ranks_comes_first():
    plan = plan_binding(nodes_of_sockets(0, 1, 1), 2)
    assert [rank.memory_nodes for rank in plan.ranks] == [(1,), (2,)]


def test_more_ranks_than_nodes_share_them():
    plan = plan_binding(two_sockets(1), 4)
    assert cpus_of(plan) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert [rank.memory_nodes for rank in plan.ranks] == [(0,), (0,), (1,), (1,)]
    assert plan.warnings == [
        "ranks 0-1 share memory node 0: 4 cores for each of 2",
        "ranks 2-3 share memory node 1: 4 cores for each of 2",
    ]


def test_parts_of_a_node_are_equal():
    """3 ranks on 8 cores: 2 each, since all would wait for the one with 2."""
    plan = plan_binding(two_sockets(1), 6)
    assert [len(cpus) for cpus in cpus_of(plan)] == [2] * 6
    assert cpus_of(plan)[:3] == [(0, 1), (2, 3), (4, 5)]


def test_more_ranks_go_where_more_cores_are():
    topology = Topology(
        (UsableNode(0, 0, (0,), (0,), True), UsableNode(1, 1, tuple(range(1, 9)), tuple(range(1, 9)), True))
    )
    assert cpus_of(plan_binding(topology, 3)) == [(0,), (1, 2, 3, 4), (5, 6, 7, 8)]


def test_more_ranks_than_cores_share_them():
    topology = Topology((UsableNode(0, 0, (0, 1), (0, 1), True),))
    plan = plan_binding(topology, 4)
    assert cpus_of(plan) == [(0,), (0,), (1,), (1,)]
    assert [rank.num_threads for rank in plan.ranks] == [1] * 4
    assert plan.warnings == [
        "ranks 0-3 share memory node 0: it has 2 cores, so that ranks wait for each other's turn on them"
    ]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 24))
def test_every_rank_has_cpus_that_nobody_else_has_unless_they_are_too_few(nodes_per_socket, cores, size):
    topology = two_sockets(nodes_per_socket, cores)
    plan = plan_binding(topology, size)
    assert len(plan.ranks) == size
    for rank in plan.ranks:
        assert rank.cpus and set(rank.cpus) <= set(topology.cpus) and rank.num_threads == len(rank.cpus)
        assert len(rank.memory_nodes) == 1
    given_out = [cpu for cpus in cpus_of(plan) for cpu in cpus]
    if size <= 2 * nodes_per_socket * cores:
        assert len(given_out) == len(set(given_out))
    else:
        assert set(given_out) == set(topology.cpus)


def test_a_list_of_cpus_for_each_rank():
    plan = plan_binding(two_sockets(1), 2, "0-3, 9 | 8,10")
    assert plan.ranks == [RankBinding(0, (0, 1, 2, 3, 9), (0, 1), 5), RankBinding(1, (8, 10), (1,), 2)]
    assert plan.warnings == []
    assert plan_binding(two_sockets(1), 1, "5,4").ranks == [RankBinding(0, (5, 4), (0,), 2)]


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("0-7|8-15", 4, "--cpu-binding is '0-7|8-15', which has 2 lists of CPUs for 4 ranks"),
        ("0-7", 2, "--cpu-binding is '0-7', which has 1 list of CPUs for 2 ranks"),
        ("0-7|", 2, "--cpu-binding is '0-7|', which names no CPU for rank 1"),
        ("0-7|6-9", 2, "--cpu-binding is '0-7|6-9', where ranks 0 and 1 both have CPUs 6-7"),
        ("0|1|2,0", 3, "where ranks 0 and 2 both have CPU 0"),
        ("0-7|8-17", 2, "--cpu-binding of rank 1 is '8-17', but this process may not use CPUs 16-17, only 0-15"),
        ("0-x", 1, "--cpu-binding of rank 0 is '0-x', expected CPU numbers and ranges such as 0-7,9"),
    ],
)
def test_lists_that_cannot_be(text, size, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_binding(two_sockets(1), size, text)


def test_ranks_are_cut_from_the_cpus_of_the_environment(monkeypatch, tmp_path, caplog):
    """TILEWRIGHT_BIND with several ranks: as if the process had only those. TILEWRIGHT_NUM_THREADS: of each rank."""
    system = write_system(tmp_path, {0: (range(8), GIB), 1: (range(8, 16), GIB)})
    monkeypatch.setattr(binding_module, "read_topology", lambda: read_topology(system=system))
    settings = config.resolve({"TILEWRIGHT_BIND": "4-11", "TILEWRIGHT_NUM_THREADS": "3"}, range(16))
    monkeypatch.setattr(config, "from_environment", lambda: settings)
    with caplog.at_level(logging.INFO, "tilewright"):
        ranks = binding_of_ranks(2)
    assert ranks == [RankBinding(0, (4, 5, 6, 7), (0,), 3), RankBinding(1, (8, 9, 10, 11), (1,), 3)]
    assert caplog.messages == [
        "rank 0: CPUs 4-7 of node 0, 3 threads; rank 1: CPUs 8-11 of node 1, 3 threads",
    ]
    with pytest.raises(ConfigError, match="may not use CPUs 0-3, only 4-11"):
        binding_of_ranks(2, "0-7|8-11")
    assert binding_of_ranks(1) is None
    assert binding_of_ranks(1, "4-5") == [RankBinding(0, (4, 5), (0,), 3)]


def test_warnings_are_logged(monkeypatch, caplog):
    monkeypatch.setattr(binding_module, "read_topology", lambda: two_sockets(1))
    binding_of_ranks(4)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_more_threads_than_cpus_are_allowed_with_a_warning():
    plan = plan_binding(two_sockets(1), 2, "0-3|4", num_threads=2)
    assert [rank.num_threads for rank in plan.ranks] == [2, 2]
    assert plan.warnings == [
        "TILEWRIGHT_NUM_THREADS is 2 for each rank, but rank 1 has 1 CPU: threads share it, which is slow"
    ]


@pytest.mark.parametrize(
    ("quota", "threads", "text"),
    [
        (4.0, 2, "the control group allows the time of 4 CPUs: 2 threads on each of 2 ranks instead of 8"),
        (3.5, 1, "the control group allows the time of 3.5 CPUs: 1 thread on each of 2 ranks instead of 8"),
        (0.5, 1, "the control group allows the time of 0.5 CPUs: 1 thread on each of 2 ranks instead of 8"),
        (16.0, 8, None),
    ],
)
def test_the_quota_bounds_threads(quota, threads, text):
    plan = plan_binding(two_sockets(1, cpu_quota=quota), 2)
    assert [rank.num_threads for rank in plan.ranks] == [threads] * 2
    assert plan.warnings == ([] if text is None else [text])
    assert cpus_of(plan)[0] == tuple(range(8))


def test_threads_that_the_user_asks_for_are_not_bounded_by_the_quota():
    plan = plan_binding(two_sockets(1, cpu_quota=4.0), 2, num_threads=4)
    assert [rank.num_threads for rank in plan.ranks] == [4, 4]
    assert plan.warnings == [
        "the control group allows the time of 4 CPUs, but TILEWRIGHT_NUM_THREADS asks for 8 threads on 2 ranks: "
        "they will be throttled"
    ]


def test_a_rank_on_a_node_without_memory_has_what_the_system_gives():
    topology = Topology((UsableNode(0, 0, (0,), (0,), True), UsableNode(1, 0, (1,), (1,), False)))
    assert [rank.memory_nodes for rank in plan_binding(topology, 2).ranks] == [(0,), ()]
    assert plan_binding(topology, 1, "0-1").ranks[0].memory_nodes == (0,)


def test_a_binding_survives_the_round_trip():
    binding = RankBinding(1, (4, 2), (0, 1), 2)
    assert RankBinding.from_json(binding.to_json()) == binding
    assert str(binding) == "rank 1: CPUs 4,2 of nodes 0-1, 2 threads"
    assert str(RankBinding(0, (3,), (), 1)) == "rank 0: CPU 3, 1 thread"
