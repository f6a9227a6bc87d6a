"""Whatever else runs, and however little room there is, every answer is the one the request gets alone."""

import dataclasses

import hypothesis.strategies as st
import pytest
from fuzzing import num_cases
from hypothesis import given, settings
from mock_model import (
    VOCABULARY_SIZE,
    answer,
    check_no_pages_are_held,
    make_core,
    media_inputs,
    run_all,
    text_inputs,
)

from tilewright.engine.kv.cross import cross_groups_of
from tilewright.engine.kv.prefix_cache import pages_in_window
from tilewright.types import RequestError, SamplingParams

# Of a page each where pages are of 4 tokens, so that pages are alike that come after others.
BLOCKS = [[5, 6, 7, 8], [5, 6, 7, 9], [7, 8, 5, 6]]
# A key stands for one content, so it always has the same number of features.
MEDIA = [(bytes([number]) * 16, lengths) for number, lengths in enumerate([[3], [3], [2, 4], [2, 4], [6], 3, 5, 9, 9])]


@st.composite
def prompts(draw):
    """Tokens, some with a beginning that others have too, and media among them."""
    blocks = draw(st.lists(st.sampled_from(BLOCKS + [[medium] for medium in MEDIA]), max_size=4))
    parts = [part for block in blocks for part in block]
    return media_inputs(parts + draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)))


sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24) | st.none(),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {3: 4.0, 7: -100.0}]),
    seed=st.integers(-1, 3),
    stop_token_ids=st.sampled_from([(), (4,)]),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 1, 3]),
)
sampling |= sampling.map(lambda params: dataclasses.replace(params, min_tokens=min(6, params.max_tokens or 6)))


@st.composite
def window_pages(draw, page_size):
    """Sliding windows, and how many pages each has: often no more than one sequence needs to go on."""
    windows = draw(st.sampled_from([(), (1,), (4,), (6,), (2, 9), (13,)]))
    return {window: pages_in_window(window, page_size) + draw(st.sampled_from([0, 0, 1, 5, 30])) for window in windows}


@st.composite
def cores(draw):
    max_sequences = draw(st.integers(1, 5))
    page_size = draw(st.sampled_from([1, 4, 5]))
    return {
        "num_pages": draw(st.sampled_from([8, 10, 16, 40])),
        "page_size": page_size,
        "window_pages": draw(window_pages(page_size)),
        "num_cross_pages": draw(st.sampled_from([4, 10, 40])),
        "prefix_cache": draw(st.booleans()),
        "num_drafts": draw(st.sampled_from([0, 1, 4])),
        "max_feature_bytes": draw(st.sampled_from([0, 60, 10_000])),
        "max_context": draw(st.sampled_from([50, 10_000])),
        "max_sequences": max_sequences,
        "max_tokens_per_step": max_sequences + draw(st.sampled_from([0, 1, 6, 100])),
        "max_encode_patches": draw(st.sampled_from([1, 20, 1000])),
        "max_encode_patches_beside_decodes": draw(st.sampled_from([1, 20, 1000])),
        "max_rows_with_drafts": draw(st.sampled_from([4, 32])),
    }


requests = st.tuples(prompts(), sampling, st.integers(0, 12), st.none() | st.integers(0, 20))


@settings(max_examples=num_cases(100), deadline=None)
@given(cores(), st.lists(requests, min_size=1, max_size=7))
def test_every_answer_is_the_one_alone(options, requests):
    core = make_core(**options)
    scheduler = core.scheduler
    max_states = scheduler.resources.media.cross_cache.num_states
    sequences = {}
    deltas = []
    for number in range(5000):
        for name, (inputs, params, arrival, _) in enumerate(requests):
            if number == arrival:
                if len(inputs.token_ids) >= scheduler.max_context:
                    with pytest.raises(RequestError, match=str(scheduler.max_context)):
                        core.add(str(name), inputs, params)
                elif any(group.num_states > max_states for group in cross_groups_of(inputs.media)):
                    with pytest.raises(RequestError, match=f"at most {max_states}"):
                        core.add(str(name), inputs, params)
                else:
                    sequences[name] = core.add(str(name), inputs, params)
        for name, (_, _, arrival, abort_after) in enumerate(requests):
            if abort_after is not None and number == arrival + abort_after:
                deltas += core.abort(str(name))
        if number > 12 and not core.has_work:
            break
        deltas += core.step().deltas
    assert not core.has_work
    for name, group in sequences.items():
        inputs, params, _, abort_after = requests[name]
        for sequence in group:
            expected = answer(inputs, params, sequence.index, scheduler.max_context)
            output = sequence.output_token_ids
            if sequence.finish_reason == "abort":
                assert abort_after is not None and output == expected[: len(output)]
            else:
                assert output == expected
            assert [item for owner, delta in deltas if owner is sequence for item in delta.token_ids] == output
            reasons = [delta.finish_reason for owner, delta in deltas if owner is sequence]
            assert reasons[-1] == sequence.finish_reason and not any(reasons[:-1])
    check_no_pages_are_held(core)
    assert not scheduler.resources.media.features._pins
    scheduler.resources.media.cross_cache.clear()
    assert sorted(scheduler.resources.media.cross_cache._free) == list(
        range(scheduler.resources.media.cross_cache.num_pages)
    )
    assert scheduler.resources.media.features.size_bytes <= scheduler.resources.media.features.max_bytes


def test_the_mock_is_read_through_its_pages():
    """The test above could not fail if answers did not depend on what the pages hold."""
    inputs, params = text_inputs([1, 2, 3, 4, 5, 6]), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    core = make_core()
    (sequence,) = core.add("a", inputs, params)
    core.step()
    core.runner.values[sequence.pages[0], 1] += 1
    run_all(core)
    assert sequence.output_token_ids != answer(inputs, params)
    assert all(0 <= token_id < VOCABULARY_SIZE for token_id in sequence.output_token_ids)


def test_the_mock_looks_through_the_pages_of_groups():
    inputs = media_inputs([1, (b"p" * 16, 6), 2])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    core = make_core()
    (sequence,) = core.add("a", inputs, params)
    core.step()
    core.runner.states[core.resources.media.cross_cache.pages(sequence.cross_groups[0].key)[1], 1] += 1
    run_all(core)
    assert sequence.output_token_ids != answer(inputs, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_loses_nothing(temperature):
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(4)]
    core = make_core(num_pages=12, num_drafts=3)
    sequences = [core.add(str(item.seed), text_inputs([1 + item.seed, 2, 3, 2, 3]), item)[0] for item in params]
    run_all(core)
    assert core.scheduler.num_preemptions > 0
    for sequence in sequences:
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        assert sequence.finish_reason == "length"
    assert core.resources.kv.pool.num_used == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_nothing_but_the_number_of_steps(temperature):
    num_steps = {}
    for num_drafts in (0, 4):
        core = make_core(num_drafts=num_drafts)
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=120, ignore_eos=True, n=3)
        sequences = core.add("a", text_inputs([1, 2, 3, 4, 1, 2, 3, 4]), params)
        run_all(core)
        for sequence in sequences:
            assert sequence.output_token_ids == answer(sequence.inputs, params, sequence.index)
        num_steps[num_drafts] = len(core.runner.steps)
    assert core.scheduler.drafter.num_accepted > 30
    assert num_steps[4] < num_steps[0]
