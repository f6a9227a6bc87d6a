"""A binding in force: in the process of a worker, and in one whose kernels have run before."""

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from worker_entries import cpus_of_threads, memory_policy

from tilewright import config
from tilewright.config import ConfigError
from tilewright.host.binding import RankBinding
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.native import apply_binding, bind_team, kernels, release_binding, work_alone
from tilewright.process.workers import Workers, WorkerSpec

CPUS = sorted(os.sched_getaffinity(0))[:2]
HAS_NODES = memory_policy() is not None


def state():
    """What a binding changes of this process and thread."""
    return (
        os.sched_getaffinity(0),
        kernels.num_threads(),
        torch.get_num_threads(),
        memory_policy(),
        config.current(),
    )


@pytest.fixture
def unbound():
    """Checks that a test leaves the process as it found it."""
    linear(torch.ones(64, 64), pack_weight(torch.ones(64, 64)))
    before = state()
    yield before
    assert state() == before


def run_worker(entry, **options):
    """What an entry point wrote, as JSON, before it returned."""
    reading, writing = os.pipe()
    try:
        specs = [WorkerSpec(1, {"cpus": CPUS}, (writing,), **options)]
        with Workers(f"worker_entries:{entry}", specs, 2, may_finish=True) as workers:
            assert workers.wait(120)
    finally:
        os.close(writing)
    with open(reading) as file:
        return json.loads(file.read())


def test_a_worker_computes_on_its_cpus(monkeypatch):
    """Also if the environment, which it inherits, names others: those are what ranks were cut from."""
    monkeypatch.setenv("TILEWRIGHT_BIND", config.format_cpus(CPUS))
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "5")
    cpu = CPUS[-1]
    told = run_worker("compute", binding=RankBinding(1, (cpu,), (0,) if HAS_NODES else (), 2))
    assert (told["num_threads"], told["torch_threads"]) == (2, 2)
    assert len(told["cpus_of_threads"]) >= 2 and all(cpus == [cpu] for cpus in told["cpus_of_threads"])
    assert told["memory_policy"] == ("prefer:0" if HAS_NODES else None)


def test_where_the_system_forbids_it_a_warning_tells_and_the_rank_computes(capfd):
    told = run_worker("compute_confined")
    assert told["num_threads"] == 2
    assert told["memory_policy"] in ("default", None)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("rank 1: WARNING tilewright.host.binding: rank 1 is not bound to")
    assert "(set_mempolicy: Operation not permitted)" in lines[1]


def test_the_engine_s_process_is_bound_and_released(unbound):
    binding = RankBinding(0, (CPUS[-1],), (0,) if HAS_NODES else (), 1)
    apply_binding(binding)
    assert os.sched_getaffinity(0) == {CPUS[-1]}
    assert (kernels.num_threads(), torch.get_num_threads()) == (1, 1)
    assert memory_policy() == ("prefer:0" if HAS_NODES else None)
    assert config.current().bind_cpus == (CPUS[-1],)
    assert config.current().available_cpus == config.from_environment().available_cpus
    release_binding()
    assert state() == unbound


def test_threads_of_the_team_are_pinned_one_by_one(unbound):
    apply_binding(RankBinding(0, tuple(CPUS), (), len(CPUS)))
    try:
        pinned = cpus_of_threads()
        assert all({cpu} in pinned for cpu in CPUS)
        assert os.sched_getaffinity(0) == {CPUS[0]}
    finally:
        release_binding()


def test_other_threads_follow_when_they_bind_their_team(unbound):
    seen = {}

    def step():
        bind_team()
        seen["stepping"] = os.sched_getaffinity(0)

    def prepare():
        work_alone()
        seen["preparing"] = os.sched_getaffinity(0)

    apply_binding(RankBinding(0, (CPUS[-1],), (), 1))
    try:
        for target in (step, prepare):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    finally:
        release_binding()
    assert seen == {"stepping": {CPUS[-1]}, "preparing": set(config.current().available_cpus)}


def test_two_holders_of_one_binding(unbound):
    binding = RankBinding(0, (CPUS[0],), (), 1)
    apply_binding(binding)
    apply_binding(binding)
    with pytest.raises(ConfigError, match="this process is bound already"):
        apply_binding(RankBinding(0, (CPUS[-1],), (), 2))
    release_binding()
    assert os.sched_getaffinity(0) == {CPUS[0]} and kernels.num_threads() == 1
    release_binding()
    with pytest.raises(RuntimeError, match="release_binding without apply_binding"):
        release_binding()


def test_a_policy_that_is_refused_is_told_once(unbound, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "set_memory_policy", lambda policy, nodes: 38)
    apply_binding(RankBinding(0, (CPUS[0],), (997,), 1))  # a node that no other test warns of
    try:
        bind_team()
    finally:
        release_binding()
    assert [record.getMessage() for record in caplog.records if "set_mempolicy" in record.getMessage()] == [
        "the system does not let us choose where memory comes from (set_mempolicy: Function not implemented): pages "
        "are on the node of the thread that first writes them, which for bound threads is the same, here 997"
    ]


def test_cpus_that_cannot_be_claimed_are_told(unbound, monkeypatch, caplog):
    def refuse(pid, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with caplog.at_level(logging.WARNING, "tilewright"):
        apply_binding(RankBinding(3, (CPUS[0],), (), 1))
    with ThreadPoolExecutor(1) as executor:
        executor.submit(work_alone).result()
    release_binding()
    monkeypatch.undo()
    text = f"rank 3 is not bound to CPU {CPUS[0]}: Operation not permitted"
    assert caplog.messages == [text]


def test_a_policy_must_be_known():
    with pytest.raises(ValueError, match="unknown memory policy 'far', expected local, prefer or interleave"):
        kernels.set_memory_policy("far", [0])
    assert kernels.set_memory_policy("prefer", [1024]) == 22
