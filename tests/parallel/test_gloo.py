"""The gloo group: the bits of the shared-memory group, errors that name ranks, and when it is chosen."""

import errno
import logging
import re

import pytest
import torch
from rank_processes import run_ranks, started_ranks
from test_collectives import added, check_sizes, each_pair_of_types, fused, gather_columns, gather_into_narrower, refuse

from tilewright.ops.native import kernels
from tilewright.ops.plan import Arena, Plan
from tilewright.parallel.gloo import GlooGroup
from tilewright.parallel.group import CollectiveError, SharedMemoryGroup
from tilewright.parallel.rendezvous import Rendezvous, make_group, open_rendezvous

pytestmark = pytest.mark.alone  # up to three ranks, which wait for each other
LOOPBACK = "127.0.0.1"


def some_sizes(rendezvous, rank, dtype):
    group = make_group(rendezvous, rank)
    return type(group).__name__, check_sizes(group, 1, [1, 2, 7, 4096, 16384, 16385, 70_001], dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_gives_the_bits_of_shared_memory(size, dtype):
    shared = run_ranks(size, some_sizes, dtype)
    gloo = run_ranks(size, some_sizes, dtype, host=LOOPBACK)
    assert {kind for kind, _ in shared} == {"SharedMemoryGroup"} and {kind for kind, _ in gloo} == {"GlooGroup"}
    assert {digest for _, digest in shared} == {digest for _, digest in gloo}


@each_pair_of_types
@pytest.mark.parametrize("body", [fused, added])
def test_gloo_adds_and_norms_as_shared_memory_does(body, x_dtype, dtype):
    assert run_ranks(2, body, x_dtype, dtype, host=LOOPBACK) == run_ranks(2, body, x_dtype, dtype)


@pytest.mark.parametrize("body", [gather_columns, gather_into_narrower])
def test_gloo_gathers_as_shared_memory_does(body):
    assert all(run_ranks(3, body, torch.bfloat16, host=LOOPBACK))


def until_failure(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 1:
        return None  # the process ends
    texts = []
    for _ in range(2):
        try:
            group.all_reduce(torch.ones(10))
        except RuntimeError as error:
            texts.append((type(error).__name__, str(error)))
    return texts


def test_gloo_names_a_lost_rank():
    with started_ranks(3, until_failure, host=LOOPBACK, timeout_s=10) as (host, ranks):
        assert ranks[1].result() is None
        host.abort(1)  # nothing to tell: its connections have closed
        for rank in (0, 2):
            assert ranks[rank].result() == [
                (
                    "CollectiveError",
                    f"group 'tp', all_reduce, operation {number}: rank 1 was lost or did not arrive within 10 s; the "
                    "group is broken",
                )
                for number in (2, 3)
            ]


def refusals(rendezvous, rank):
    group = make_group(rendezvous, rank)
    assert not group.recordable
    texts = []
    with Plan(Arena()).record():
        texts.append(refuse(lambda: group.all_reduce(torch.ones(4))))
    texts.append(refuse(lambda: group.all_reduce(torch.ones(2, 3).t())))
    texts.append(refuse(lambda: group.broadcast(torch.ones(4), 2)))
    texts.append(refuse(lambda: group.all_reduce(torch.ones(4).double())))
    texts.append(refuse(lambda: group.all_reduce(torch.ones(4), out=torch.ones(5))))
    texts.append(refuse(lambda: group.reduce_scatter(torch.ones(3), out=torch.ones(1))))
    group.barrier()
    group.close()
    texts.append(refuse(group.barrier, CollectiveError))
    return texts


def test_gloo_refuses_what_it_cannot_do():
    texts = [
        "all_reduce of a gloo group cannot be part of a recorded plan",
        "all_reduce: out is torch.float32 [3, 2] with strides (1, 3), expected 6 elements of torch.float32, contiguous",
        "broadcast: root is 2, expected 0 to 1",
        "all_reduce: x is torch.float64, expected torch.float32 or torch.bfloat16",
        "all_reduce: out is torch.float32 [5] with strides (1,), expected 4 elements of torch.float32, contiguous",
        "reduce_scatter: x is [3], expected a part for each of 2 ranks",
        "group 'tp': barrier after close",
    ]
    assert run_ranks(2, refusals, host=LOOPBACK) == [texts, texts]


def test_gloo_is_chosen_where_there_is_no_memfd(monkeypatch, caplog):
    def fail(num_ranks, slot_bytes):
        raise OSError(errno.ENOSYS, "memfd_create")

    monkeypatch.setattr(kernels, "create_segment", fail)
    with open_rendezvous(2) as host:
        assert host.rendezvous.segment_fd is None and host.rendezvous.address[0] == LOOPBACK and host.pass_fds == ()
    assert re.search(r"group 'tp': no shared memory \(.*memfd_create.*\), its ranks use gloo", caplog.text)


def test_the_log_says_which_group_it_is(caplog):
    caplog.set_level(logging.INFO)
    with open_rendezvous(2, name="columns") as host:
        group = host.make_group(1)
        host.abort(0)  # its own descriptor is still there
    assert isinstance(group, SharedMemoryGroup) and group.recordable
    assert "group 'columns': rank 1 of 2, shared memory" in caplog.text
    group.close()
    assert refuse(group.barrier, CollectiveError) == "group 'columns': barrier after close"


def test_a_rendezvous_survives_json():
    rendezvous = Rendezvous(2, "tp", 1.5, address=(LOOPBACK, 1234))
    assert Rendezvous.from_json(rendezvous.to_json()) == rendezvous


def test_ranks_beyond_the_group_are_refused():
    assert refuse(lambda: GlooGroup((LOOPBACK, 1), 2, 2, "tp", 1.0)) == "rank is 2, expected 0 to 1"
    assert "has nothing to meet at" in refuse(lambda: make_group(Rendezvous(2, "tp", 1.0), 0))
