"""Pages of layers with a sliding window: held for the window alone, found by it, shared out beside the others."""

import pytest
from mock_model import answer, check_no_pages_are_held, make_core, run_all, text_inputs

from tilewright.engine.kv.prefix_cache import pages_in_window
from tilewright.engine.measure import memory
from tilewright.types import RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TOKENS = [1 + index % 7 for index in range(30)]


@pytest.mark.parametrize(("window", "expected"), [(1, 1), (2, 2), (5, 2), (6, 3), (9, 3), (10, 4)])
def test_how_many_pages_a_window_lies_in(window, expected):
    """At most, wherever it begins: counted page by page."""
    spans = [{place // 4 for place in range(last - window + 1, last + 1)} for last in range(100, 104)]
    assert pages_in_window(window, 4) == max(map(len, spans)) == expected


def asked_again(forget):
    """How many tokens of a prompt are cached after it was answered and the window's pages `forget` are gone."""
    core = make_core(page_size=4, window_pages={6: 30})
    (sequence,) = core.add("a", text_inputs(TOKENS), GREEDY)
    run_all(core)
    for index in forget:
        core.resources.windows[6].pool.forget(sequence.page_digests[index])
    (again,) = core.add("b", text_inputs(TOKENS), GREEDY)
    run_all(core)
    assert again.output_token_ids == answer(again.inputs, GREEDY)
    check_no_pages_are_held(core)
    return again.num_cached_tokens


@pytest.mark.parametrize(
    ("forget", "num_cached"),
    [
        ([], 28),
        (range(5), 28),  # token 28 sees those from 23 on, which begin in page 5
        ([6], 24),
        ([5], 20),  # 24 and 28 both see page 5
        ([1, 3, 5], 4),  # and what a first page ends with is seen from 0 on
        (range(7), 0),
    ],
    ids=str,
)
def test_a_prompt_continues_where_its_window_is_cached(forget, num_cached):
    assert asked_again(forget) == num_cached


def test_a_sequence_holds_its_window_alone():
    core = make_core(page_size=4, window_pages={6: 3}, max_tokens_per_step=4, max_sequences=4)
    (sequence,) = core.add("a", text_inputs(TOKENS), GREEDY)
    while core.has_work:
        core.step()
        held = sequence.window_pages.get(6)
        assert held is None or (len(held.pages) <= 2 and held.stop * 4 >= sequence.num_computed_tokens)
    assert sequence.output_token_ids == answer(sequence.inputs, GREEDY)


def test_too_few_pages_for_a_window_are_refused():
    with pytest.raises(ValueError, match="2 pages of 4 tokens for a window of 6, expected at least 3"):
        make_core(page_size=4, window_pages={6: 2})


def test_how_memory_is_shared_out():
    in_window = pages_in_window(1024, 64)
    assert in_window == 17
    # 4,096 tokens take 64 pages of ten bytes, and twice a window's of five.
    assert memory.num_window_pages([1024], [5], 10, 10**6, 81_000) == (81_000 * 34 // (64 * 10 + 34 * 5),)
    assert memory.num_window_pages([1024], [5], 0, 10**6, 1000) == (200,)  # all layers have the window
    assert memory.num_window_pages([1024], [5], 10, 100, 10**6) == (100,)  # no more than could ever be used
    assert memory.num_window_pages([1024], [5], 10, 100, 95) == (in_window,)  # what one sequence needs, and a page
    assert memory.num_window_pages([], [], 10, 100, 95) == ()
    with pytest.raises(RequestError, match=r"kv_memory is 94 bytes, expected at least 95: .* the windows of 1024"):
        memory.num_window_pages([1024], [5], 10, 100, 94)
