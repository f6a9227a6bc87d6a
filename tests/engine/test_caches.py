import dataclasses

import pytest
from mock_model import answer, make_core, media_inputs, run_all, text_inputs

from tilewright.engine.kv.cross import CrossCache, cross_groups_of
from tilewright.engine.kv.pages import PagePool
from tilewright.engine.media.encoder_cache import EncoderCache
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
        with pytest.raises(RuntimeError, match="has no references"):
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
        cache = core.resources.kv.prefix_cache
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
        assert sequence.num_cached_tokens == 0 and core.resources.kv.prefix_cache.num_tokens_looked_up == 0


def group(key, num_states):
    (made,) = cross_groups_of(media_inputs([(key * 16, num_states)]).media)
    return made


class TestSceneCache:
    def test_the_least_recently_used_is_given_up_whole(self):
        cache = CrossCache(6, 4)
        made = {key: group(key, 8) for key in (b"a", b"b", b"c", b"d")}
        for key in (b"a", b"b", b"c"):
            assert cache.pin(made[key])
            cache.fill(made[key].key)
            cache.unpin(made[key].key)
        assert cache.num_pages_used == 0 and cache.is_filled(made[b"a"].key)
        cache.pages(made[b"a"].key)
        assert cache.pin(made[b"d"]) and cache.num_pages_used == 2
        assert [cache.is_filled(made[key].key) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, False]

    def test_what_is_pinned_stays(self):
        cache = CrossCache(3, 4)
        first, second = group(b"a", 8), group(b"b", 8)
        assert cache.pin(first) and cache.pin(first)
        cache.fill(first.key)
        assert not cache.pin(second)
        cache.unpin(first.key)
        cache.clear()
        assert not cache.pin(second) and cache.is_filled(first.key)
        cache.unpin(first.key)
        assert cache.pin(second) and not cache.is_filled(first.key)
        assert (cache.num_lookups, cache.num_hits, cache.hit_rate) == (3, 1, 1 / 3)

    def test_what_was_never_filled_is_not_kept(self):
        cache = CrossCache(2, 4)
        made = group(b"a", 8)
        cache.pin(made)
        cache.unpin(made.key)
        assert not cache.is_filled(made.key) and len(cache._free) == 2

    def test_slots_go_through_the_pages(self):
        cache = CrossCache(5, 4)
        made = group(b"a", 10)
        cache.pin(made)
        pages = cache.pages(made.key).tolist()
        assert cache.slots(made.key, 10).tolist() == [4 * pages[i // 4] + i % 4 for i in range(10)]

    def test_what_is_not_there(self):
        with pytest.raises(KeyError):
            CrossCache(2, 4).pages(b"a")


class TestScene:
    def test_a_token_sees_the_pictures_of_its_run_up_to_itself(self):
        parts = [1, (b"a" * 16, 3), (b"b" * 16, 4), 2, 3, (b"c" * 16, 5), 4]
        first, second = cross_groups_of(media_inputs(parts).media)
        assert [(item.start, item.stop, item.num_states) for item in first.cross_spans(0, 99)] == [(1, 2, 3), (2, 5, 7)]
        assert [(item.start, item.stop, item.num_states) for item in first.cross_spans(3, 4)] == [(3, 4, 7)]
        assert [(item.start, item.stop, item.num_states) for item in second.cross_spans(0, 99)] == [(5, 99, 5)]
        assert not list(first.cross_spans(5, 99)) and not list(second.cross_spans(0, 5))

    def test_the_key_goes_by_content_and_order(self):
        pairs = [(b"a", b"b"), (b"b", b"a"), (b"a", b"b")]
        keys = [cross_groups_of(media_inputs([(a * 16, 3), (b * 16, 3)]).media)[0].key for a, b in pairs]
        assert keys[0] == keys[2] != keys[1]


class TestEncoderCache:
    def test_bounded_least_recently_used_first(self):
        cache = EncoderCache(3 * 40)
        for key in (b"a", b"b", b"c"):
            cache.put(key, 40)
        assert cache.id_of(b"a") == 0  # and it is the latest used
        cache.put(b"d", 40)
        assert [cache.has(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
        assert cache.size_bytes == 120
        cache.put(b"d", 20)
        assert cache.size_bytes == 100

    def test_what_is_pinned_stays(self):
        cache = EncoderCache(50)
        cache.pin(b"a")
        cache.pin(b"a")
        cache.put(b"a", 80)
        cache.put(b"b", 4)
        assert cache.has(b"a") and not cache.has(b"b")
        cache.unpin(b"a")
        cache.clear()
        assert cache.has(b"a")
        cache.unpin(b"a")
        assert not cache.has(b"a") and cache.size_bytes == 0

    def test_hits(self):
        cache = EncoderCache(1000)
        cache.pin(b"a")
        cache.pin(b"a")  # about to be put by the first
        cache.put(b"a", 4)
        cache.pin(b"a")
        cache.pin(b"b")
        assert (cache.num_lookups, cache.num_hits, cache.hit_rate) == (4, 2, 0.5)

    def test_ids_are_used_again_once_runners_have_dropped_them(self):
        cache = EncoderCache(100)
        for key in (b"a", b"b"):
            cache.put(key, 40)
        assert [cache.id_of(key) for key in (b"a", b"b", b"a")] == [0, 1, 0]
        cache.put(b"c", 40)
        assert cache.id_of(b"c") == 2 and not cache.has(b"b")
        cache.put(b"d", 40)
        assert cache.id_of(b"d") == 3 and not cache.has(b"a")  # runners still have features 0 and 1
        assert cache.pop_dropped(1) == [1]
        assert cache.id_of(b"e") == 1
        assert cache.pop_dropped(10) == [0] and cache.pop_dropped(10) == []

    def test_the_id_of_a_medium_that_could_not_be_encoded_is_dropped(self):
        cache = EncoderCache(100)
        cache.pin(b"a")
        assert cache.id_of(b"a") == 0
        cache.unpin(b"a")
        assert cache.pop_dropped(10) == [0] and cache.id_of(b"b") == 0
