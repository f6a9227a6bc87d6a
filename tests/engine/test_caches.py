import dataclasses

import pytest
import torch
from mock_model import answer, make_core, run_all, text_inputs

from tilewright.engine.feature_cache import FeatureCache
from tilewright.engine.pages import PagePool
from tilewright.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class TestPagePool:
    def test_pages_are_distinct_until_none_is_left(self):
        pool = PagePool(3, 4)
        assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
        assert pool.num_free == 0 and pool.num_used == 3
        with pytest.raises(RuntimeError, match="all 3 pages"):
            pool.allocate()

    def test_the_least_recently_used_is_evicted_and_of_a_chain_the_last(self):
        pool = PagePool(4, 4)
        first, second = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
        for page in first + second:
            pool.name(page, bytes([page]))
        pool.release(first)
        pool.release(second)
        assert pool.num_free == 4 and pool.find(bytes([first[0]])) == first[0]
        assert [pool.allocate() for _ in range(3)] == [first[1], first[0], second[1]]
        assert pool.find(bytes([first[0]])) is None and pool.find(bytes([second[0]])) == second[0]

    def test_a_found_page_is_not_evicted(self):
        pool = PagePool(2, 4)
        pages = [pool.allocate(), pool.allocate()]
        pool.name(pages[0], b"x")
        pool.release(pages)
        pool.retain(pool.find(b"x"))
        assert pool.allocate() == pages[1] and pool.num_free == 0

    def test_only_one_page_has_a_content(self):
        pool = PagePool(2, 4)
        first, second = pool.allocate(), pool.allocate()
        pool.name(first, b"x")
        pool.name(second, b"x")
        pool.release([second])
        assert pool.find(b"x") == first and pool.allocate() == second

    def test_a_page_is_released_only_as_often_as_it_is_held(self):
        pool = PagePool(2, 4)
        page = pool.allocate()
        pool.release([page])
        with pytest.raises(RuntimeError, match="nobody refers"):
            pool.release([page])

    def test_clear(self):
        pool = PagePool(2, 4)
        pages = [pool.allocate(), pool.allocate()]
        pool.name(pages[0], b"x")
        pool.name(pages[1], b"y")
        pool.release(pages[:1])
        pool.clear()
        assert pool.find(b"x") is None and pool.find(b"y") is None and pool.num_free == 1
        pool.release(pages[1:])
        assert pool.num_free == 2

    def test_sizes_are_checked(self):
        with pytest.raises(ValueError, match="0 pages of 4 tokens"):
            PagePool(0, 4)


class TestPrefixCache:
    def test_the_next_turn_finds_prompt_and_answer(self):
        core = make_core(page_size=4)
        (first,) = core.add("a", text_inputs(range(1, 11)), GREEDY)
        run_all(core)
        (second,) = core.add("b", text_inputs([*first.token_ids, 5, 6]), GREEDY)
        run_all(core)
        assert second.num_cached_tokens == 16  # of 17 computed
        assert second.output_token_ids == answer(second.inputs, GREEDY)
        cache = core.scheduler.prefix_cache
        assert (cache.num_tokens_looked_up, cache.num_tokens_hit) == (10 + 20, 16)
        assert cache.hit_rate == 16 / 30

    def test_a_whole_prompt_is_never_found(self):
        core = make_core(page_size=4)
        for expected in (0, 4):
            (sequence,) = core.add("a", text_inputs(range(1, 9)), GREEDY)
            run_all(core)
            assert sequence.num_cached_tokens == expected
            assert sequence.output_token_ids == answer(sequence.inputs, GREEDY)

    def test_a_page_is_found_only_after_what_it_came_after(self):
        core = make_core(page_size=4)
        first, second, last = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
        for blocks in ([first, last], [second, first], [second, last]):
            (sequence,) = core.add("a", text_inputs([*blocks[0], *blocks[1], 1]), GREEDY)
            run_all(core)
            assert sequence.output_token_ids == answer(sequence.inputs, GREEDY)
        assert sequence.num_cached_tokens == 4

    def test_a_page_is_found_only_at_its_positions(self):
        core = make_core(page_size=4)
        inputs = text_inputs(range(1, 10))
        for shifted in (inputs, dataclasses.replace(inputs, positions=inputs.positions + 1, next_position=10)):
            (sequence,) = core.add("a", shifted, GREEDY)
            run_all(core)
            assert sequence.num_cached_tokens == 0
            assert sequence.output_token_ids == answer(shifted, GREEDY)

    def test_off(self):
        core = make_core(prefix_cache=False)
        for _ in range(2):
            (sequence,) = core.add("a", text_inputs(range(1, 20)), GREEDY)
            run_all(core)
        assert sequence.num_cached_tokens == 0 and core.scheduler.prefix_cache.num_tokens_looked_up == 0


class TestFeatureCache:
    def test_bounded_least_recently_used_first(self):
        cache = FeatureCache(3 * 40)
        for key in (b"a", b"b", b"c"):
            cache.put(key, torch.zeros(10, 1))
        assert cache.get(b"a").shape == (10, 1)
        cache.put(b"d", torch.zeros(10, 1))
        assert [cache.has(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
        assert cache.size_bytes == 120
        cache.put(b"d", torch.zeros(5, 1))
        assert cache.size_bytes == 100

    def test_what_is_pinned_stays(self):
        cache = FeatureCache(50)
        cache.pin(b"a")
        cache.pin(b"a")
        cache.put(b"a", torch.zeros(20, 1))
        cache.put(b"b", torch.zeros(1, 1))
        assert cache.has(b"a") and not cache.has(b"b")
        cache.unpin(b"a")
        cache.clear()
        assert cache.has(b"a")
        cache.unpin(b"a")
        assert not cache.has(b"a") and cache.size_bytes == 0

    def test_hits(self):
        cache = FeatureCache(1000)
        cache.pin(b"a")
        cache.pin(b"a")  # about to be put by the first
        cache.put(b"a", torch.zeros(1, 1))
        cache.pin(b"a")
        cache.pin(b"b")
        assert (cache.num_lookups, cache.num_hits, cache.hit_rate) == (4, 2, 0.5)

    def test_what_is_not_there(self):
        with pytest.raises(KeyError):
            FeatureCache(10).get(b"a")
