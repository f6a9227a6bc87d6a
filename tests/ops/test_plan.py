"""A recorded step replayed with other numbers in its buffers: as the calls give it, and no wild number is used."""

import threading

import pytest
import torch
from helpers import rand

from tilewright.ops.attention import KvCache, kv_store, paged_attention
from tilewright.ops.conv import causal_conv
from tilewright.ops.embedding import embedding, scatter_rows
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.moe import PackedExperts, moe
from tilewright.ops.native import kernels
from tilewright.ops.norm import rms_norm
from tilewright.ops.plan import Arena, Plan

PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 32, 4, 3


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """Two sequences that decode, in two layers over the same tables."""

    def __init__(self) -> None:
        self.ids = torch.tensor([3, 7])
        self.table = rand(20, 32)
        self.packed_table = pack_weight(rand(20, 32, seed=3))
        self.caches = [KvCache.empty(NUM_PAGES, PAGE_SIZE, 2, 16, torch.float32) for _ in range(2)]
        for cache in self.caches:
            cache.data.zero_()
        self.slots = torch.tensor([PAGE_SIZE + 7, -1])
        self.block_table = torch.tensor([[0, 1, 99], [3, -1, 99]], dtype=torch.int32)  # pages past the keys: anything
        self.query_starts, self.kv_lengths = int32(0, 1, 2), int32(40, 20)
        self.states, self.taps = torch.zeros(NUM_SLOTS, 3, 32), rand(4, 32, seed=1)
        self.read_slots, self.write_slots = int32(0, 2), int32(0, -1)
        self.expert_ids = torch.tensor([[0], [2]], dtype=torch.int32)
        self.gate_up = PackedExperts.empty(3, 64, 32, True, torch.float32)
        self.down = PackedExperts.empty(3, 32, 32, False, torch.float32)
        for expert in range(3):
            self.gate_up.pack(expert, rand(64, 32, seed=expert))
            self.down.pack(expert, rand(32, 32, seed=expert + 3))
        self.rows = torch.tensor([1])

    def run(self) -> torch.Tensor:
        x = embedding(self.ids, self.table)
        scatter_rows(x, self.rows, embedding(self.ids[:1], self.packed_table))
        x = causal_conv(x, self.taps, self.states, self.query_starts, self.read_slots, self.write_slots)
        heads = x.view(2, 2, 16)
        for cache in self.caches:
            kv_store(heads, heads, cache, self.slots)
            heads = paged_attention(heads, cache, self.block_table, self.query_starts, self.kv_lengths)
        return moe(heads.view(2, 32), self.expert_ids, torch.ones(2, 1), self.gate_up, self.down)


NUM_CALLS = 9


@pytest.fixture
def recorded():
    step, plan = Step(), Plan(Arena())
    with plan.record():
        result = step.run()
    return step, plan, result


def test_a_step_that_raises_leaves_its_memory():
    arena, addresses = Arena(), []
    for _ in range(3):
        with pytest.raises(KeyError), arena.use(), arena.scope():
            addresses.append(arena.empty((100,), torch.float32).data_ptr())
            raise KeyError
    assert len(set(addresses)) == 1


def test_a_replay_follows_the_numbers(recorded):
    step, plan, result = recorded
    assert plan.num_calls == NUM_CALLS
    for ids, kv_lengths, slots in (([1, 19], (41, 20), (40, -1)), ([0, 2], (64, 32), (63, 3 * PAGE_SIZE))):
        step.ids.copy_(torch.tensor(ids))
        step.kv_lengths.copy_(int32(*kv_lengths))
        step.slots.copy_(torch.tensor(slots))
        step.states.zero_()
        plan.replay()
        step.states.zero_()
        assert torch.equal(result.clone(), step.run())


BAD_NUMBERS = [
    ("block_table", (0, 1), NUM_PAGES, r"paged_attention: block_table\[0, 1\] is 4, expected 0 to 3"),
    ("block_table", (1, 0), -1, r"paged_attention: block_table\[1, 0\] is -1, expected 0 to 3"),
    ("kv_lengths", (1,), 97, r"paged_attention: kv_lengths\[1\] is 97, expected 0 to 96"),
    ("query_starts", (1,), 3, r"causal_conv: starts must not decrease, but \[1\] is 3 and \[2\] is 2"),
    ("slots", (1,), NUM_PAGES * PAGE_SIZE, r"kv_store: slots\[1\] is 128, the cache has 128 slots"),
    ("read_slots", (0,), NUM_SLOTS, r"causal_conv: read_slots\[0\] is 3, the pool has 3 slots"),
    ("write_slots", (1,), 2**31 - 1, r"causal_conv: write_slots\[1\] is 2147483647, the pool has 3 slots"),
    ("ids", (1,), 20, r"embedding: ids\[1\] is 20, expected 0 to 19"),
    ("rows", (0,), 2, r"scatter_rows: rows\[0\] is 2, expected 0 to 1"),
    ("expert_ids", (1, 0), 3, r"moe: ids\[1, 0\] is 3, expected 0 to 2"),
]


@pytest.mark.parametrize(("buffer", "place", "value", "message"), BAD_NUMBERS)
def test_a_number_out_of_range_is_named_and_not_used(recorded, buffer, place, value, message):
    step, plan, result = recorded
    good = result.clone()
    numbers = getattr(step, buffer)
    before = int(numbers[place])
    numbers[place] = value
    with pytest.raises(ValueError, match=message):
        plan.replay()
    numbers[place] = before
    step.states.zero_()
    plan.replay()  # and the plan is as good as before
    assert torch.equal(result, good)


@pytest.mark.parametrize("buffer", ["block_table", "slots", "read_slots"])
def test_a_step_that_is_given_a_wrong_number_changes_nothing(recorded, buffer):
    step, plan, result = recorded
    before = [tensor.clone() for tensor in (result, step.states, step.caches[0].data, step.caches[1].data)]
    getattr(step, buffer)[0] = 10_000
    step.ids.copy_(torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="10000"):
        plan.replay()
    after = (result, step.states, step.caches[0].data, step.caches[1].data)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class WideStep:
    """Large enough that each call has work for several threads, and one of one thread among them."""

    def __init__(self, rows: int = 48, width: int = 512, keys: int = 2100) -> None:
        self.x, self.norm_weight = rand(rows, width), rand(width, seed=1)
        self.up, self.down = pack_weight(rand(4 * width, width, seed=2)), pack_weight(rand(width, 4 * width, seed=3))
        num_pages = -(-keys // PAGE_SIZE)
        self.cache = KvCache.empty(num_pages, PAGE_SIZE, 8, 64, torch.float32)
        history = rand(num_pages * PAGE_SIZE, 8, 64, seed=4)
        kv_store(history, history, self.cache, torch.arange(num_pages * PAGE_SIZE))
        self.block_table = torch.arange(num_pages, dtype=torch.int32)[None]
        self.starts, self.lengths = int32(0, 1), int32(keys)  # shared by blocks of keys, then merged

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = rms_norm(self.x, self.norm_weight, 1e-6)
        x = linear(linear(x, self.up), self.down)
        heads = paged_attention(x[:1].view(1, 8, 64), self.cache, self.block_table, self.starts, self.lengths)
        return rms_norm(x, self.norm_weight, 1e-6), heads


@pytest.fixture
def threads():
    yield kernels.set_num_threads
    kernels.set_num_threads(0)


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_one_region_gives_the_bits_of_single_calls(threads, count):
    threads(1)
    step, plan = WideStep(), Plan(Arena())
    with plan.record():
        results = step.run()
    for seed in range(3):
        step.x.copy_(rand(*step.x.shape, seed=10 + seed))
        threads(1)
        expected = step.run()
        threads(count)
        for in_one_region in (True, False):
            for result in results:
                result.fill_(float("nan"))
            plan.replay(in_one_region=in_one_region)
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(step.run(), expected, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_threads_are_as_good_as_before_when_a_call_fails(threads, count):
    """The experts' ids are checked where they are used: in the midst of the region."""
    threads(count)
    step, plan = Step(), Plan(Arena())
    with plan.record():
        result = step.run()
    good = result.clone()
    for _ in range(20):
        step.expert_ids[1, 0] = 3
        with pytest.raises(ValueError, match=r"moe: ids\[1, 0\] is 3"):
            plan.replay()
        step.expert_ids[1, 0] = 2
        step.states.zero_()
        plan.replay()
        assert torch.equal(result, good)


def test_plans_of_several_threads_at_once(threads):
    threads(3)
    wrong = []

    def work(seed: int) -> None:
        step, plan = WideStep(rows=16 + seed), Plan(Arena())
        with plan.record():
            results = step.run()
        expected = [result.clone() for result in results]
        for _ in range(10):
            plan.replay()
            if not all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
