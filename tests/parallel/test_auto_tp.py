"""The number of ranks that `--tp auto` takes, and what it says about it."""

import logging
import os
import re

import pytest
from system_tree import two_sockets

from tilewright.host.binding import RankBinding
from tilewright.host.topology import Topology, UsableNode
from tilewright.parallel import auto_tp
from tilewright.parallel.auto_tp import MeasuredReads, MeasureError, choose_tp, measure_reads

CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def log(caplog):
    with caplog.at_level(logging.INFO, "tilewright"):
        yield caplog


def one_node():
    return Topology((UsableNode(0, 0, (CPU,), (CPU,), False),))


def test_one_node_is_not_measured(log):
    assert choose_tp(one_node(), measure=pytest.fail) == 1
    assert log.messages == ["tp auto: 1, as this process may use one memory node"]


def test_a_rank_per_node_where_they_read_faster(log):
    seen = []

    def measure(topology, ranks):
        seen.extend(ranks)
        return MeasuredReads(200e9, [150e9, 160e9])

    assert choose_tp(two_sockets(1), num_threads=3, measure=measure) == 2
    assert [(rank.cpus[0], rank.num_threads) for rank in seen] == [(0, 3), (8, 3)]
    assert log.messages == [
        "tp auto: 2 of 2 memory nodes: one rank per node reads 150.0 + 160.0 = 310.0 GB/s, one process on all nodes "
        "200.0 GB/s; ranks must read 1.1 times as fast"
    ]


def test_one_where_ranks_gain_nothing(log):
    assert choose_tp(two_sockets(1), measure=lambda *_: MeasuredReads(200e9, [105e9, 105e9])) == 1
    assert log.messages[0].startswith("tp auto: 1 of 2 memory nodes: one rank per node reads 105.0 + 105.0 = 210.0")


def test_a_failed_measurement_is_told(log):
    def fail(*_):
        raise MeasureError("process 1 died of SIGKILL")

    assert choose_tp(two_sockets(2), measure=fail) == 4
    assert log.records[0].levelname == "WARNING"
    assert "was not measured: process 1 died of SIGKILL" in log.messages[0]


@pytest.mark.alone
def test_a_measurement(monkeypatch):
    """Three real processes, on a small buffer: the ranks' at once, on the same CPU here."""
    monkeypatch.setattr(auto_tp, "SIZE_BYTES", 1 << 24)
    monkeypatch.setattr(auto_tp, "MEASURE_S", 0.02)
    monkeypatch.setattr(auto_tp, "TIMEOUT_S", 300.0)  # three processes load torch, maybe on two busy cores
    fds = set(os.listdir("/proc/self/fd"))
    ranks = [RankBinding(rank, (CPU,), (), 1) for rank in range(2)]
    reads = measure_reads(one_node(), ranks)
    assert reads.alone > 1e8 and len(reads.ranks) == 2 and min(reads.ranks) > 1e8
    assert set(os.listdir("/proc/self/fd")) == fds


def test_a_process_that_dies_while_it_measures(monkeypatch):
    monkeypatch.setattr(auto_tp, "PROBE", "worker_entries:finish")
    fds = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MeasureError, match="a process ended without a result"):
        measure_reads(one_node(), [RankBinding(0, (CPU,), (), 1)])
    monkeypatch.setattr(auto_tp, "PROBE", "worker_entries:none")
    with pytest.raises(MeasureError, match=re.compile("process 0 ended with status 1.*AttributeError", re.DOTALL)):
        measure_reads(one_node(), [RankBinding(0, (CPU,), (), 1)])
    assert set(os.listdir("/proc/self/fd")) == fds
