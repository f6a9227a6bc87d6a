"""Collectives between processes against sums in plain torch, in the order of ranks, bit by bit."""

import dataclasses
import functools
import hashlib
import math
import os

import pytest
import torch
from rank_processes import run_ranks, start_rank

from tilewright.ops.norm import rms_norm
from tilewright.ops.plan import Arena, Plan, empty
from tilewright.parallel.group import CollectiveError, SingleGroup
from tilewright.parallel.rendezvous import make_group, open_rendezvous

pytestmark = pytest.mark.alone  # up to four ranks, which wait for each other
NAN = float("nan")


@functools.cache
def random_numbers():
    """Of many sizes, so that a sum in another order has other bits."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.randint(0, 12, (1 << 18,), generator=generator)
    return torch.randn(1 << 18, generator=generator) * 2.0**scales


def values(rank, seed, shape, dtype):
    """What a rank brings."""
    numbers = random_numbers().roll(rank * 10007 + seed * 101)
    count = math.prod(shape)
    return numbers.repeat(-(-count // len(numbers)))[:count].view(shape).to(dtype)


def ordered_sum(parts, addend=None):
    total = parts[0].float()
    for part in [*parts[1:], *([] if addend is None else [addend])]:
        total = total + part.float()
    return total.to((parts[0] if addend is None else addend).dtype)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    words = torch.int16 if actual.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(actual.contiguous().view(words), expected.contiguous().view(words))


def digest(*tensors):
    return hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


def check_sizes(group, seed, sizes, dtype):
    """Every collective at these sizes, outputs filled with NaN before; the digest of all results."""
    results = []
    everyone = range(group.size)
    for size in sizes:
        parts = [values(rank, seed + size, (size,), dtype) for rank in everyone]
        expected = ordered_sum(parts)
        x = parts[group.rank].clone()
        out = torch.full_like(x, NAN)
        assert_same_bits(group.all_reduce(x, out=out), expected)
        assert_same_bits(x, parts[group.rank])
        assert group.all_reduce(x) is x
        assert_same_bits(x, expected)

        x = parts[group.rank].clone()
        out = torch.full((group.size * size,), NAN, dtype=dtype)
        assert_same_bits(group.all_gather(x, out=out), torch.cat(parts))

        wide = [values(rank, seed - size, (group.size * size,), dtype) for rank in everyone]
        out = torch.full((size,), NAN, dtype=dtype)
        part = ordered_sum(wide).view(group.size, size)[group.rank]
        assert_same_bits(group.reduce_scatter(wide[group.rank], out=out), part)

        root = size % group.size
        x = parts[root].clone() if group.rank == root else torch.full((size,), NAN, dtype=dtype)
        assert_same_bits(group.broadcast(x, root), parts[root])
        results += [expected, x]
    group.barrier()
    return digest(*results)


def fuzz(rendezvous, rank, seed, dtype):
    group = make_group(rendezvous, rank)
    generator = torch.Generator().manual_seed(seed)  # the same on all ranks
    exponents = torch.rand(12, generator=generator) * 5.5  # 1 to 300,000 elements
    one_phase = 65536 // group.size // dtype.itemsize  # elements: more are reduced in slices
    slot = 262144 // dtype.itemsize  # more are cut into chunks
    sizes = [1, 2, one_phase, one_phase + 1, slot, slot + 1, 2_000_003, *(10**exponents).long().tolist()]
    return check_sizes(group, seed, sizes, dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_the_order_of_ranks(size, dtype):
    digests = [run_ranks(size, fuzz, 1, dtype) for _ in range(2)]
    assert len({*digests[0], *digests[1]}) == 1, "ranks, or two runs, have other bits"


def some_sizes(rendezvous, rank):
    return check_sizes(make_group(rendezvous, rank), 2, [4096, 400_003], torch.bfloat16)


def test_neither_threads_nor_slots_change_a_bit():
    expected = run_ranks(3, some_sizes)
    assert run_ranks(3, some_sizes, num_threads=2) == expected
    assert run_ranks(3, some_sizes, slot_bytes=4096 * 5) == expected


def hundred_megabytes(rendezvous, rank):
    group = make_group(rendezvous, rank)
    x = torch.arange(25_000_000, dtype=torch.float32) % 1000 + rank
    group.all_reduce(x)
    return bool(torch.equal(x, 2 * (torch.arange(25_000_000, dtype=torch.float32) % 1000) + 1))


def test_hundred_megabytes():
    assert run_ranks(2, hundred_megabytes) == [True, True]


def two_by_two(rows_0, rows_1, columns_0, columns_1, rank):
    """Four ranks as a square: each is in the group of its row and in that of its column."""
    row, column = divmod(rank, 2)
    mine = make_group([rows_0, rows_1][row], column), make_group([columns_0, columns_1][column], row)
    for round_ in range(50):
        size = 1 + round_ * 997 % 30000
        x = torch.full((size,), 1.0 + rank)
        mine[0].all_reduce(x)
        assert torch.equal(x, torch.full((size,), 3.0 + 4 * row))
        mine[1].all_reduce(x)
        assert torch.equal(x, torch.full((size,), 10.0))
    return True


def test_several_groups_at_once():
    hosts = [open_rendezvous(2, name=name) for name in ("row 0", "row 1", "column 0", "column 1")]
    try:
        assert run_ranks(4, two_by_two, hosts=hosts) == [True] * 4
    finally:
        for host in hosts:
            host.close()


def gather_columns(rendezvous, rank, dtype):
    group = make_group(rendezvous, rank)
    for rows, width in [(1, 5), (7, 3), (33, 5001), (4, 151_936 // 3 + 1)]:
        parts = [values(one, rows, (rows, width), dtype) for one in range(group.size)]
        assert_same_bits(group.all_gather(parts[rank], dim=-1), torch.cat(parts, dim=-1))
        assert_same_bits(group.all_gather(parts[rank]), torch.cat(parts))
    tokens = torch.arange(5) * (rank + 1)
    assert group.all_gather(tokens).tolist() == [i * (one + 1) for one in range(group.size) for i in range(5)]
    assert group.broadcast(tokens, 1).tolist() == [0, 2, 4, 6, 8]
    return True


def test_gather_along_the_last_axis_and_of_integers(dtype):
    assert all(run_ranks(3, gather_columns, dtype))


def gather_into_narrower(rendezvous, rank, dtype):
    """Columns of wider tensors into columns of wider tensors, of which nothing else is touched."""
    group = make_group(rendezvous, rank)
    for rows, width, out_width in [
        (1, 5, 14),
        (7, 3, 6),
        (33, 5001, 12_000),
        (5, 40_000, 70_000),
        (4, 9, 27),
        (2, 9, 1),
    ]:
        parts = [values(one, rows, (rows, width), dtype) for one in range(group.size)]
        wide_x = torch.full((rows, width + 3), NAN, dtype=dtype)
        wide_out = torch.full((rows, out_width + 2), NAN, dtype=dtype)
        wide_x[:, 1:-2] = parts[rank]
        out = wide_out[:, 1:-1]
        assert group.all_gather(wide_x[:, 1:-2], dim=-1, out=out) is out
        assert_same_bits(out, torch.cat(parts, dim=-1)[:, :out_width])
        assert wide_out[:, 0].isnan().all() and wide_out[:, -1].isnan().all()
    out = torch.full((5, 3, 4 * group.size), NAN, dtype=dtype)
    mine = out[..., 4 * rank : 4 * rank + 4]  # x where it will stay
    mine.copy_(values(rank, 3, (5, 3, 4), dtype))
    group.all_gather(mine, dim=-1, out=out)
    assert_same_bits(out, torch.cat([values(one, 3, (5, 3, 4), dtype) for one in range(group.size)], dim=-1))
    return True


def test_gather_into_fewer_columns(dtype):
    assert all(run_ranks(3, gather_into_narrower, dtype))


FUSED_SHAPES = [(1, 1), (1, 4096), (3, 1000), (8, 4096), (16, 4099), (100, 4096), (700, 1536)]


def fused(rendezvous, rank, x_dtype, dtype):
    group = make_group(rendezvous, rank)
    results = []
    for rows, width in FUSED_SHAPES:
        parts = [values(one, rows, (rows, width), x_dtype) for one in range(group.size)]
        residual, weight = values(7, rows, (rows, width), dtype), values(8, rows, (width,), torch.float32)
        expected = ordered_sum(parts, residual)
        out = torch.full_like(residual, NAN)
        assert group.all_reduce_norm(parts[rank], residual, weight, 1e-6, weight_plus_one=True, out=out) is out
        assert_same_bits(residual, expected)
        assert_same_bits(out, rms_norm(expected, weight, 1e-6, weight_plus_one=True))
        x = parts[rank]
        if x_dtype == dtype:  # then out may be x
            assert_same_bits(group.all_reduce_norm(x, residual, weight, 1e-6, out=x), rms_norm(residual, weight, 1e-6))
            results.append(x)
        results += [residual, out]
    return digest(*results)


TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
each_pair_of_types = pytest.mark.parametrize("x_dtype,dtype", TYPES, ids=["f32", "bf16", "f32_to_bf16"])


@each_pair_of_types
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_with_residual_and_norm(size, x_dtype, dtype):
    assert len(set(run_ranks(size, fused, x_dtype, dtype))) == 1


def added(rendezvous, rank, x_dtype, dtype):
    """all_reduce_add into a tensor, then in place; and its norm as all_reduce_norm has it."""
    group = make_group(rendezvous, rank)
    results = []
    for rows, width in FUSED_SHAPES:
        parts = [values(one, rows, (rows, width), x_dtype) for one in range(group.size)]
        residual, weight = values(7, rows, (rows, width), dtype), values(8, rows, (width,), dtype)
        expected, x, kept = ordered_sum(parts, residual), parts[rank].clone(), residual.clone()
        out = torch.full_like(residual, NAN)
        assert group.all_reduce_add(x, residual, out=out) is out
        assert_same_bits(out, expected)
        assert_same_bits(residual, kept)
        assert_same_bits(x, parts[rank])
        assert group.all_reduce_add(x, residual) is residual
        assert_same_bits(residual, expected)
        normed = group.all_reduce_norm(x, kept, weight, 1e-6)
        assert_same_bits(kept, residual)
        assert_same_bits(normed, rms_norm(residual, weight, 1e-6))
        results += [out, normed]
    return digest(*results)


@each_pair_of_types
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_adds_to_a_residual(size, x_dtype, dtype):
    assert len(set(run_ranks(size, added, x_dtype, dtype))) == 1


def replayed(rendezvous, rank):
    """A recorded step with each collective of a layer, on new numbers each time, as it computes unrecorded."""
    group = make_group(rendezvous, rank)
    x, residual = torch.empty(4, 512), torch.empty(4, 512, dtype=torch.bfloat16)
    weight = values(9, 0, (512,), torch.float32)

    def step(group=group):
        summed = group.all_reduce(rms_norm(x, weight, 1e-6))
        group.all_reduce_add(x, residual)
        normed = group.all_reduce_norm(summed, residual, weight, 1e-6)
        return group.all_gather(normed[:, 100:200], dim=-1, out=empty((4, 150), torch.bfloat16))

    def fill(seed):
        x.copy_(values(rank, seed, (4, 512), torch.float32))
        residual.copy_(values(9, seed, (4, 512), torch.bfloat16))

    plan = Plan(Arena())
    fill(0)
    with plan.record():
        result = step()
    assert plan.num_calls == 5
    for seed in range(1, 6):
        fill(seed)
        expected = step().clone()
        fill(seed)
        result.fill_(NAN)
        plan.replay()
        assert_same_bits(result, expected)
    del group, step  # the plan keeps what it calls
    fill(6)
    plan.replay()
    return digest(result, residual)


def test_a_recorded_step_replays_its_collectives():
    assert len(set(run_ranks(3, replayed))) == 1


def refuse(call, kind=ValueError):
    """The text of the error that the call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def refusals(rendezvous, rank):
    group = make_group(rendezvous, rank)
    x = torch.ones(4, 6)
    calls = [
        lambda: group.all_reduce(x.double()),
        lambda: group.all_reduce(x.t()),
        lambda: group.all_reduce(x, out=torch.ones(23)),
        lambda: group.reduce_scatter(torch.ones(3, 2)),
        lambda: group.all_gather(x, out=torch.ones(24)),
        lambda: group.all_gather(x, dim=1),
        lambda: group.all_gather(x, dim=-1, out=torch.ones(4, 13)),
        lambda: group.all_gather(torch.ones(3, 4, 6)[:, :2], dim=-1, out=torch.ones(3, 2, 12)),
        lambda: group.all_reduce_add(x.bfloat16(), x.clone()),
        lambda: group.all_reduce_add(x, x.bfloat16(), out=x.clone()),
        lambda: group.broadcast(x, 2),
        lambda: group.all_reduce_norm(x, x.clone(), torch.ones(5), 1e-6),
        lambda: group.all_reduce_norm(torch.ones(300_000), torch.ones(300_000), torch.ones(300_000), 1e-6),
    ]
    texts = [refuse(call) for call in calls]
    group.all_reduce(x)  # bad arguments are refused before anybody waits: the group goes on
    assert torch.equal(x, torch.full((4, 6), 2.0))
    return texts


def test_what_does_not_fit_is_refused_and_named():
    texts = [
        "all_reduce: x is float64, expected float32 or bfloat16",
        "all_reduce: x has strides [1, 6], its last axis must be contiguous",
        "all_reduce: out is float32 [23], expected as many elements as x, float32 [4, 6]",
        "reduce_scatter: x is [3, 2], expected a multiple of 2 rows",
        "all_gather: x is float32 [4, 6] and out float32 [24], expected out to be 2 times x, a part per rank",
        "all_gather: dim is 1 of x with 2 axes, expected the first, 0, or the last, -1",
        "all_gather: x is float32 [4, 6] and out float32 [4, 13], expected out to have 4 rows of at most 12 columns, 6 "
        "per rank",
        "all_gather: x has strides [24, 6, 1] for shape [3, 2, 6]: its leading axes do not form evenly spaced rows; "
        "call .contiguous()",
        "all_reduce_add: residual is float32 [4, 6], expected bfloat16 as x is, bfloat16 [4, 6]",
        "all_reduce_add: out is float32, expected bfloat16 as residual",
        "broadcast: root is 2, expected 0 to 1",
        "all_reduce_norm: weight has shape [5], expected [D=6]",
        "all_reduce_norm: x is float32 [300000], expected rows of 1 to 65536 elements",
    ]
    assert run_ranks(2, refusals) == [texts, texts]


def disagreeing(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    return refuse(lambda: group.all_reduce(torch.ones(8 + rank)), CollectiveError)


def disagreeing_types(rendezvous, rank):
    group = make_group(rendezvous, rank)
    residual = torch.ones(8, dtype=[torch.float32, torch.bfloat16][rank])
    return refuse(lambda: group.all_reduce_add(torch.ones(8), residual), CollectiveError)


def test_ranks_whose_residuals_have_other_types_are_told():
    assert run_ranks(2, disagreeing_types)[0] == (
        "group 'tp', all_reduce_add, operation 1: rank 1 came for all_reduce_add of 8 float32 into bfloat16, rank 0 "
        "for all_reduce_add of 8 float32; the group is broken"
    )


def test_ranks_that_come_with_other_sizes_are_told():
    first, second = run_ranks(2, disagreeing)
    assert first == (
        "group 'tp', all_reduce, operation 2: rank 1 came for all_reduce of 9 float32, rank 0 for all_reduce of 8 "
        "float32; the group is broken"
    )
    assert "rank 0 came for all_reduce of 8 float32" in second


def test_a_rank_is_taken_once():
    with open_rendezvous(2) as host:
        rank = start_rank(1, taken, [host.rendezvous])
        assert rank.result() == "group 'tp': rank 1 is taken already"
        rank.process.join(30)


def taken(rendezvous, rank):
    second = dataclasses.replace(rendezvous, segment_fd=os.dup(rendezvous.segment_fd))
    make_group(rendezvous, rank)
    return refuse(lambda: make_group(second, rank))


def test_a_single_rank_asks_nobody(dtype):
    with open_rendezvous(1) as host:
        assert host.pass_fds == ()
        group = make_group(host.rendezvous, 0)
    assert isinstance(group, SingleGroup)
    x, weight = values(0, 1, (3, 40), dtype), torch.ones(40)
    residual, kept = values(1, 1, (3, 40), dtype), x.clone()
    assert group.all_reduce(x) is x and group.all_gather(x, dim=-1) is x and group.reduce_scatter(x) is x
    assert group.broadcast(x) is x
    group.barrier()
    out = torch.full_like(x, NAN)
    assert_same_bits(group.all_gather(x, out=out), kept)
    expected = ordered_sum([x], residual)
    assert_same_bits(group.all_reduce_norm(x, residual, weight, 1e-6), rms_norm(expected, weight, 1e-6))
    assert_same_bits(residual, expected)
    narrow = torch.full((3, 40), NAN, dtype=dtype)[:, 5:25]
    assert_same_bits(group.all_gather(x, dim=-1, out=narrow), kept[:, :20])


def test_a_single_rank_adds_and_replays():
    group = SingleGroup()
    x, weight = values(0, 1, (3, 40), torch.float32), torch.ones(40)
    kept = values(1, 1, (3, 40), torch.bfloat16)
    residual, other, out = kept.clone(), kept.clone(), torch.empty(3, 30)
    plan = Plan(Arena())
    with plan.record():
        group.all_gather(x, dim=-1, out=out)
        group.all_reduce_add(x, residual)
        normed = group.all_reduce_norm(x, other, weight, 1e-6)
    expected = ordered_sum([x], kept)
    for replay in (lambda: None, plan.replay):
        replay()
        assert_same_bits(residual, expected)
        assert_same_bits(other, expected)
        assert_same_bits(normed, rms_norm(expected, weight, 1e-6))
        assert_same_bits(out, x[:, :30])
        expected = ordered_sum([x], expected)
        out.fill_(NAN)
