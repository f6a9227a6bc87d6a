"""Ranks that are killed, hang or never come: the others say which, in time, and nothing is left of the group."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from rank_processes import holders_of_segments, run_ranks, started_ranks

from tilewright.ops.plan import Arena, Plan
from tilewright.parallel.group import CollectiveError
from tilewright.parallel.rendezvous import make_group, open_rendezvous

pytestmark = pytest.mark.alone  # no other process of this run may hold memory of a group
TIMEOUT_S = 4.0  # ranks of a busy machine may be seconds apart
PATIENCE_S = 60.0  # for a machine with other things to do: an error must come, only later


def work_until_failure(rendezvous, rank, elements):
    """All-reduces until one fails; the error's text and type, how long that one took, and the descriptors left open."""
    group = make_group(rendezvous, rank)
    x = torch.ones(elements)
    operation = 0
    while True:
        x.fill_(1.0)
        operation += 1
        began = time.monotonic()
        try:
            group.all_reduce(x)
        except RuntimeError as error:
            took_s = time.monotonic() - began
            first = (type(error).__name__, str(error))
            break
    try:
        group.barrier()
        second = "no error"
    except RuntimeError as error:
        second = str(error)
    group.close()
    return first, second, operation, took_s, holders_of_segments_of(os.getpid())


def holders_of_segments_of(pid):
    return [what for process, what in holders_of_segments() if process == pid]


def names_in_shared_memory():
    return sorted(entry.name for entry in Path("/dev/shm").iterdir())


@pytest.mark.parametrize("elements", [2048, 300_000], ids=["8KB", "1.2MB"])
def test_a_killed_rank_is_named_after_the_time_out(elements):
    names = names_in_shared_memory()
    with started_ranks(3, work_until_failure, elements, timeout_s=TIMEOUT_S) as (_, ranks):
        wait_until_working(ranks)
        time.sleep(random.Random(elements).uniform(0, 0.2))  # somewhere in an operation
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        for rank in (0, 2):
            (kind, text), second, operation, took_s, held = ranks[rank].result()
            assert kind == "CollectiveError"
            assert text == (
                f"group 'tp', all_reduce, operation {operation}: rank 1 did not arrive within 4 s; the group is broken"
            )
            assert f"rank 1 did not arrive at operation {operation} within 4 s; the group is broken" in second
            assert TIMEOUT_S * 0.9 < took_s < PATIENCE_S
            assert held == []
    assert_nothing_is_left(ranks, names)


def test_the_launcher_tells_of_a_dead_rank_at_once():
    names = names_in_shared_memory()
    with started_ranks(3, work_until_failure, 2048, timeout_s=600) as (host, ranks):
        wait_until_working(ranks)
        ranks[2].process.kill()
        ranks[2].process.join()
        host.abort(2)
        for rank in (0, 1):
            (_, text), second, operation, _, _ = ranks[rank].result(PATIENCE_S)
            assert text == f"group 'tp', all_reduce, operation {operation}: rank 2 was lost; the group is broken"
            assert second == f"group 'tp', barrier, operation {operation + 1}: rank 2 was lost; the group is broken"
    assert_nothing_is_left(ranks, names)


def test_a_rank_that_hangs_is_named():
    with started_ranks(2, work_until_failure, 100, timeout_s=TIMEOUT_S) as (_, ranks):
        wait_until_working(ranks)
        os.kill(ranks[0].process.pid, signal.SIGSTOP)
        (_, text), *_ = ranks[1].result()
        assert re.search(r"operation \d+: rank 0 did not arrive within 4 s", text)
        os.kill(ranks[0].process.pid, signal.SIGCONT)  # it comes too late, and hears so
        (_, text), *_ = ranks[0].result()
        assert re.search(
            r"operation \d+: rank 0 did not arrive( at operation \d+)? within 4 s; the group is broken", text
        )


def replay_alone(rendezvous, rank):
    group = make_group(rendezvous, rank)
    x = torch.ones(100)
    plan = Plan(Arena())
    with plan.record():
        group.all_reduce(x)
    if rank == 1:
        return None
    with pytest.raises(CollectiveError) as caught:
        plan.replay()
    return str(caught.value)


def test_a_replayed_step_names_a_lost_rank():
    assert run_ranks(2, replay_alone, timeout_s=TIMEOUT_S) == [
        "group 'tp', all_reduce, operation 2: rank 1 did not arrive within 4 s; the group is broken",
        None,
    ]


def test_abort_of_no_rank_is_refused():
    with open_rendezvous(2) as host, pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        host.abort(2)


def test_groups_are_bounded():
    for size in (0, 33):
        with pytest.raises(ValueError, match=f"a group has {size} ranks, expected 1 to 32"):
            open_rendezvous(size)
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_s is"):
            open_rendezvous(2, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="slot_bytes is 100, expected a multiple of 4096"):
        open_rendezvous(2, slot_bytes=100)


def wait_until_working(ranks):
    """Until every rank has mapped the group, and so is about to make its first all-reduce."""
    pids = {rank.process.pid for rank in ranks}
    deadline = time.monotonic() + 120
    while pids - {pid for pid, what in holders_of_segments() if what == "maps"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_nothing_is_left(ranks, names):
    assert not any(rank.process.is_alive() for rank in ranks)
    assert holders_of_segments() == []
    assert names_in_shared_memory() == names
