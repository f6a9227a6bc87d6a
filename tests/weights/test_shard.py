"""The rule by which axes are split over ranks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.weights.spec import (
    PADDING,
    Shard,
    Sharded,
    Weight,
    WeightSource,
    heads_together,
    shard_of,
    share_of_width,
    split_heads,
    split_width,
    stacked,
)

SIZES = (1, 2, 3, 4, 5, 6, 16)


class Plain(Weight):
    def build_from(self, readers, dtype):
        (reader,) = readers
        self._value = reader.read().to(dtype)


def test_every_entry_of_a_width_is_somewhere_once():
    for width, size, block in itertools.product((1, 7, 32, 100, 4096, 11008), SIZES, (1, 32, 128)):
        shards = [split_width(width, rank, size, block) for rank in range(size)]
        entries = [entry for shard in shards for entry in shard.entries() if entry != PADDING]
        assert entries == list(range(width))
        assert {shard.length for shard in shards} == {share_of_width(width, size, block)}


def test_blocks_are_whole_but_for_the_last():
    for width, size, block in itertools.product((100, 512, 1000, 11008), SIZES[1:], (32, 128)):
        for rank in range(size):
            for first, length in split_width(width, rank, size, block).runs:
                assert first == PADDING or first % block == 0
                assert first == PADDING or length % block == 0 or first + length == width


def test_shares_are_whole_tiles_where_that_costs_little():
    assert share_of_width(11008, 3) == 3680  # 3,670 by itself
    assert share_of_width(768, 6) == 128
    assert share_of_width(100, 3) == 34  # 64 would be nearly twice as much


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "num_queries, num_keys", [(16, 8), (16, 2), (16, 16), (20, 20), (24, 4), (28, 4), (5, 1), (12, 3), (64, 8)]
)
def test_every_query_head_is_on_one_rank_beside_its_key(num_queries, num_keys, size):
    shards = [split_heads(num_queries, num_keys, rank, size) for rank in range(size)]
    assert len({(shard.num_queries, shard.num_keys) for shard in shards}) == 1
    found = []
    for shard in shards:
        queries, keys = shard.queries.entries(), shard.keys.entries()
        per_key = shard.num_queries // shard.num_keys
        assert shard.num_queries == per_key * shard.num_keys
        for place, query in enumerate(queries):
            if query != PADDING:
                found.append(query)
                assert keys[place // per_key] == query // (num_queries // num_keys)
    assert sorted(found) == list(range(num_queries))


@pytest.mark.parametrize(
    "num_queries, num_keys, size, expected",
    [
        (16, 8, 2, (8, 4)),
        (16, 2, 4, (4, 1)),  # a key on two ranks each, no query padded
        (16, 8, 3, (6, 3)),
        (16, 2, 3, (6, 2)),  # 18 queries in all, not 24
        (32, 8, 6, (6, 3)),  # 36 queries and 18 keys, not 48 and 12
        (20, 20, 3, (7, 7)),
        (16, 16, 6, (3, 3)),
    ],
)
def test_the_cut_with_the_fewest_heads_is_taken(num_queries, num_keys, size, expected):
    shard = split_heads(num_queries, num_keys, 0, size)
    assert (shard.num_queries, shard.num_keys) == expected


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("num_queries, num_keys, head_width", [(16, 8, 64), (12, 4, 96), (20, 20, 80), (3, 3, 24)])
def test_heads_fill_whole_blocks_of_scales(num_queries, num_keys, head_width, size):
    together = heads_together(128, head_width)
    for rank in range(size):
        shard = split_heads(num_queries, num_keys, rank, size, together)
        for heads, count in ((shard.queries, num_queries), (shard.keys, num_keys)):
            for first, length in heads.times(head_width).runs:
                assert first == PADDING or first % 128 == 0
                assert first == PADDING or length % 128 == 0 or first + length == count * head_width


def test_shards_join_shift_and_scale():
    shard = shard_of([2, 3, PADDING, PADDING, 0])
    assert shard == Shard(((2, 2), (PADDING, 2), (0, 1)))
    assert (shard.length, shard.num_padded) == (5, 2)
    assert shard.times(3) == Shard(((6, 6), (PADDING, 6), (0, 3)))
    assert shard.after(10) == Shard(((12, 2), (PADDING, 2), (10, 1)))
    assert Shard(((0, 2),)) + Shard(((2, 3),)) == Shard.whole(5)
    assert stacked(Shard(((1, 1),)), 4, 3) == Shard(((1, 1), (5, 1), (9, 1)))
    assert list(shard.between(1, 4)) == [(3, 1), (PADDING, 2)]


@given(st.data())
def test_a_sharded_tensor_is_what_its_entries_say(data):
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    axes = [data.draw(st.none() | st.lists(st.integers(-1, size - 1), min_size=1, max_size=6)) for size in shape]
    tensor = torch.arange(1, 1 + shape[0] * shape[1] * shape[2]).view(shape).float()
    expected = tensor
    for axis, entries in enumerate(axes):
        if entries is not None:
            padded = torch.cat([expected, torch.zeros_like(expected.narrow(axis, 0, 1))], dim=axis)
            expected = padded.index_select(axis, torch.tensor([e % padded.shape[axis] for e in entries]))
    shards = tuple(None if entries is None else shard_of(entries) for entries in axes)
    weight = Plain([WeightSource("x", shape, shards)])
    weight.build([tensor], torch.float32)
    assert torch.equal(weight.value, expected)
    begin = data.draw(st.integers(0, len(expected) - 1))
    end = data.draw(st.integers(begin + 1, len(expected)))
    reader = Sharded(InMemory(tensor), weight.sources[0])
    assert reader.shape == tuple(expected.shape)
    assert torch.equal(reader.rows(begin, end), expected[begin:end])


class InMemory:
    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def rows(self, begin, end):
        return self.tensor[begin:end]


def test_the_shard_is_part_of_the_recipe():
    whole, part = (Plain([WeightSource("x", (8, 4), (shard,))]) for shard in (None, Shard(((0, 4),))))
    assert whole.recipe != part.recipe
