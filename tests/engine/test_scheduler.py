import itertools

import pytest
from mock_model import NOT_WRITTEN, answer, make_core, media_inputs, run_all, text_inputs

from tilewright.engine.schedule.step import StepLimits
from tilewright.types import ContextLengthExceeded, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
KEY = b"k" * 16


def greedy(max_tokens=4, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def prompt(length, first=1):
    return text_inputs([first + index % 7 for index in range(length)])


def step_of_first_token(core, sequence):
    return next(
        number
        for number, chunks in enumerate(core.runner.steps)
        for owner, start, count in chunks
        if owner is sequence and start + count == sequence.num_prompt_tokens
    )


def test_decodes_come_before_prompts_and_share_the_budget():
    core = make_core(max_tokens_per_step=10, max_sequences=4)
    (first,) = core.add("a", prompt(5), greedy(20))
    core.step()
    (second,) = core.add("b", prompt(25, first=2), GREEDY)
    core.step()
    assert core.runner.steps[-1] == [(first, 5, 1), (second, 0, 9)]
    core.step()
    assert core.runner.steps[-1] == [(first, 6, 1), (second, 9, 9)]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    core = make_core(num_pages=200, max_tokens_per_step=16, max_sequences=8)
    (long,) = core.add("long", prompt(320), GREEDY)
    (short,) = core.add("short", prompt(12, first=2), GREEDY)
    run_all(core)
    assert step_of_first_token(core, short) == 1
    # Half of the budget for two steps, and a token of each of the other's three later steps, are all it costs.
    assert step_of_first_token(core, long) == 320 // 16


def test_a_stream_of_short_prompts_leaves_half_of_the_budget_to_a_long_one():
    core = make_core(num_pages=200, max_tokens_per_step=16, max_sequences=8, prefix_cache=False)
    (long,) = core.add("long", prompt(80), GREEDY)
    for number in range(10):
        core.add(f"short{number}", prompt(8, first=2), greedy(1))
        core.step()
    assert long.num_output_tokens == 1


def test_prompts_of_one_length_are_computed_by_arrival():
    core = make_core(max_tokens_per_step=10, max_sequences=4, prefix_cache=False)
    sequences = [core.add(str(number), prompt(20), greedy(1))[0] for number in range(3)]
    run_all(core)
    assert [step_of_first_token(core, sequence) for sequence in sequences] == [1, 3, 5]


def test_a_request_that_never_fits_is_refused():
    core = make_core(num_pages=4, page_size=4)
    with pytest.raises(
        ContextLengthExceeded, match=r"is 16 tokens.* in 16 tokens, .* memory for keys and values holds"
    ):
        core.add("a", prompt(16), GREEDY)
    core = make_core(max_context=10)
    with pytest.raises(ContextLengthExceeded, match=r"is 10 tokens.* in 10 tokens, the answer needs at least one"):
        core.add("a", prompt(10), GREEDY)
    with pytest.raises(RequestError, match="no tokens"):
        core.add("a", text_inputs([]), GREEDY)
    with pytest.raises(RequestError, match="the prompt has token 24, expected 0 to 23"):
        core.add("a", text_inputs([1, 24]), GREEDY)
    with pytest.raises(RequestError, match="logit_bias has token 99"):
        core.add("a", prompt(3), SamplingParams(logit_bias={99: 1.0}))
    assert not core.has_work


def test_the_end_of_the_pool_and_of_the_context_is_length():
    for options in ({"num_pages": 4}, {"max_context": 16}):
        core = make_core(page_size=4, **options)
        (sequence,) = core.add("a", prompt(6), greedy(None))
        run_all(core)
        assert (sequence.num_tokens, sequence.finish_reason) == (16, "length")
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params, max_context=16)


def test_the_latest_is_preempted_and_resumes():
    core = make_core(num_pages=6, page_size=4, prefix_cache=False)
    (first,) = core.add("a", prompt(7), greedy(10))
    (second,) = core.add("b", prompt(7), greedy(10))
    while not core.scheduler.num_preemptions:
        core.step()
    assert core.scheduler.running == [first] and core.scheduler.waiting == [second]
    assert second.num_output_tokens > 0 and not second.pages
    run_all(core)
    assert first.output_token_ids == second.output_token_ids == answer(first.inputs, first.params)


def test_pages_computed_again_are_found_again():
    core = make_core(num_pages=6, page_size=4)
    core.add("a", prompt(7), greedy(10))
    core.add("b", prompt(7, first=8), greedy(10))
    while not core.scheduler.num_preemptions:
        core.step()
    core.resources.kv.pool.clear()  # as if others had needed the pages in the meantime
    run_all(core)
    (third,) = core.add("c", prompt(7, first=8), greedy(1))
    run_all(core)
    assert core.scheduler.num_preemptions == 1 and third.num_cached_tokens == 4


def test_a_sequence_waiting_for_pages_is_not_overtaken():
    core = make_core(num_pages=10, page_size=4)
    core.add("a", prompt(20), greedy(16))
    core.step()
    (big,) = core.add("big", prompt(30, first=2), GREEDY)
    (small,) = core.add("small", prompt(2, first=3), GREEDY)
    core.step()
    assert core.scheduler.waiting == [big, small]
    run_all(core)
    assert big.started_s < small.started_s


def test_abort_gives_everything_back():
    core = make_core()
    core.add("a", media_inputs([1, (KEY, [6]), 2]), greedy(50, n=2))
    core.add("b", prompt(9), greedy(50))
    for _ in range(3):
        core.step()
    aborted = core.abort("a")
    assert sorted(delta.index for _, delta in aborted) == [0, 1]
    assert all(delta.finish_reason == "abort" for _, delta in aborted)
    assert core.abort("a") == []
    run_all(core)
    assert core.resources.kv.pool.num_used == 0 and not core.resources.media.features._pins


def test_n_answers_compute_the_prompt_once():
    core = make_core(page_size=4)
    sequences = core.add("a", prompt(21), SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, n=4))
    run_all(core)
    computed = [count for chunks in core.runner.steps for _, start, count in chunks if start < 21]
    assert computed == [21, 1, 1, 1]
    assert len({tuple(sequence.output_token_ids) for sequence in sequences}) == 4
    for sequence in sequences:
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params, sequence.index)


class TestMedia:
    def test_all_media_of_a_step_are_one_batch_and_each_is_encoded_once(self):
        core = make_core()
        core.add("a", media_inputs([1, (KEY, [5]), 2, (b"l" * 16, [3])]), GREEDY)
        core.add("b", media_inputs([3, (KEY, [5])]), GREEDY)
        step = core.scheduler.schedule()
        assert [medium.key for medium in step.encode] == [KEY, b"l" * 16]
        assert (
            core.resources.media.features.num_lookups,
            core.resources.media.features.num_hits,
        ) == (3, 1)

    def test_a_chunk_ends_before_a_medium_that_the_encoder_has_no_time_for(self):
        core = make_core(max_encode_patches=30)
        # 4 patches a feature: 20 for each, and 80 for the last, which is let through alone.
        parts = [1, (KEY, [5]), 2, (b"l" * 16, [5]), 3, (b"m" * 16, [20]), 4]
        (sequence,) = core.add("a", media_inputs(parts), GREEDY)
        run_all(core)
        chunks = [(start, count) for chunks in core.runner.steps for _, start, count in chunks]
        assert chunks[:3] == [(0, 8), (8, 7), (15, 22)]
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)

    def test_a_decode_is_not_held_back_by_the_encoder_budget(self):
        core = make_core(max_encode_patches=1)
        (first,) = core.add("a", prompt(3), greedy(10))
        core.step()
        core.add("b", media_inputs([1, (KEY, [5]), (b"l" * 16, [5])]), GREEDY)
        core.step()
        core.step()
        assert first.num_output_tokens == 3

    def test_pictures_of_others_are_encoded_a_few_at_a_time_while_answers_grow(self):
        core = make_core(max_encode_patches_beside_decodes=40)
        pictures = [media_inputs([number, (bytes([number]) * 16, [5]), 1]) for number in range(1, 9)]  # 20 patches each
        for number, inputs in enumerate(pictures[:4]):
            core.add(f"first {number}", inputs, greedy(12))
        assert len(core.scheduler.schedule().encode) == 4  # nobody waits for a token
        core.step()
        for number, inputs in enumerate(pictures[4:]):
            core.add(f"later {number}", inputs, greedy(12))
        for _ in range(2):
            step = core.step().step
            assert len(step.encode) == 2 and len(step.chunks) >= 6
        run_all(core)
        assert core.runner.num_encoded == 8

    def test_features_stay_while_they_are_read_and_no_longer(self):
        core = make_core(max_feature_bytes=0, max_tokens_per_step=4, max_sequences=2)
        (sequence,) = core.add("a", media_inputs([1, (KEY, [3, 7]), 2]), GREEDY)
        run_all(core)
        assert core.runner.num_encoded == 1
        assert not core.resources.media.features.has(KEY) and core.resources.media.features.size_bytes == 0
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)

    def test_another_picture_in_the_same_place_is_another_prefix(self):
        core = make_core()
        for key in (KEY, b"l" * 16, KEY):
            (sequence,) = core.add("a", media_inputs([1, 2, (key, [9]), 3]), GREEDY)
            run_all(core)
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        assert sequence.num_cached_tokens == 12 and core.runner.num_encoded == 2


class TestScenes:
    def test_a_picture_is_stored_once_and_encoded_once(self):
        core = make_core()
        core.add("a", media_inputs([1, (KEY, 5), 2, (b"l" * 16, 3), (KEY, 5), 3]), GREEDY)
        core.add("b", media_inputs([3, (KEY, 5), 2]), GREEDY)
        step = core.scheduler.schedule()
        assert [medium.key for medium in step.encode] == [KEY, b"l" * 16]
        assert [group.num_states for group in step.cross_groups] == [5, 8]
        cross_cache = core.resources.media.cross_cache
        assert (cross_cache.num_lookups, cross_cache.num_hits, cross_cache.num_pages_used) == (3, 1, 2 + 2)

    def test_a_chunk_ends_before_a_group_that_has_no_place(self):
        core = make_core(num_cross_pages=2)
        inputs = media_inputs([1, (KEY, 5), 2, 3, (b"l" * 16, 5), 4, (KEY, 5), 5])
        (sequence,) = core.add("a", inputs, GREEDY)
        run_all(core)
        assert [(start, count) for chunks in core.runner.steps for _, start, count in chunks][:3] == [
            (0, 4),
            (4, 2),
            (6, 2),
        ]
        assert sequence.output_token_ids == answer(inputs, GREEDY)
        assert core.runner.num_encoded == 2  # features of the first were kept

    @pytest.mark.parametrize("max_feature_bytes", [0, 1 << 20])
    def test_pictures_side_by_side_are_encoded_over_several_steps(self, max_feature_bytes):
        core = make_core(max_encode_patches=12, max_feature_bytes=max_feature_bytes)
        # 2 patches a state: 10 for each, so that two are more than a step may have.
        inputs = media_inputs([1, (KEY, 5), 2, (b"l" * 16, 5), (b"m" * 16, 5), (b"n" * 16, 5), 3])
        (sequence,) = core.add("a", inputs, greedy(2))
        text = core.add("text", prompt(4), greedy(6))[0]
        run_all(core)
        chunks_of_it = [(start, count) for step in core.runner.steps for item, start, count in step if item is sequence]
        assert chunks_of_it[:2] == [(0, 3), (3, 4)]
        assert core.runner.num_encoded == 4
        for item in (sequence, text):
            assert item.output_token_ids == answer(item.inputs, item.params)
        tokens_meanwhile = [step for step in core.runner.steps if not any(item is sequence for item, _, _ in step)]
        assert len(tokens_meanwhile) >= 2  # the other's answer went on

    def test_what_is_encoded_without_a_chunk_can_be_given_up(self, monkeypatch):
        """Such a step that raises ends the request it was for, and no other."""
        core = make_core(max_encode_patches=12)
        pictures = media_inputs([(KEY, 5), (b"l" * 16, 5), 3])
        (sequence,) = core.add("a", pictures, GREEDY)

        def update(step, sampled):
            assert step.encode and not step.chunks
            (other,) = core.add("b", prompt(4), GREEDY)
            others.append(other)
            raise ArithmeticError("no more")

        others = []
        with monkeypatch.context() as patch:
            patch.setattr(core.scheduler, "update", update)
            result = core.step()
        assert result.step is None and [*result.failures] == ["a"] and "no more" in str(result.failures["a"])
        (other,) = others
        run_all(core)
        assert sequence.finish_reason == "abort"
        assert other.output_token_ids == answer(other.inputs, other.params)
        assert core.resources.media.cross_cache.num_pages_used == 0

    def test_those_behind_a_group_without_a_place_wait_for_it(self):
        core = make_core(num_cross_pages=2)
        sequences = [core.add(str(i), media_inputs([1, (bytes([i]) * 16, 7), 2]), greedy(6))[0] for i in range(3)]
        text = core.add("text", prompt(4), greedy(3))[0]
        run_all(core)
        for sequence in (*sequences, text):
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        assert [sequence.finished_s for sequence in sequences] == sorted(item.finished_s for item in sequences)
        assert text.finished_s < sequences[1].finished_s

    @pytest.mark.parametrize("is_shared", [False, True])
    def test_small_groups_do_not_keep_a_large_one_out(self, is_shared):
        """As many new ones as there are places, or ever another question about pictures that are there."""
        core = make_core(num_cross_pages=4, max_sequences=8)  # pages of 4 states
        names = itertools.count()

        def add_small():
            name = next(names)
            key = bytes([name % 3 if is_shared else name]) * 16
            return core.add(f"small {name}", media_inputs([1, (key, 4), 2]), greedy(6))[0]

        small = [add_small() for _ in range(3)]
        for _ in range(3):
            core.step()
        (large,) = core.add("large", media_inputs([1, (b"A" * 16, 8), (b"B" * 16, 8), 2]), greedy(2))
        for _ in range(50):
            small = [sequence for sequence in small if not sequence.is_finished]
            small += [add_small() for _ in range(6 - len(small))]
            core.step()
            if large.is_finished:
                break
        assert large.output_token_ids == answer(large.inputs, large.params)

    def test_another_picture_before_the_same_text_is_another_prefix(self):
        core = make_core()
        for key in (KEY, b"l" * 16, KEY):
            (sequence,) = core.add("a", media_inputs([1, 2, 3, 4, (key, 9), 6, 7, 8, 9]), GREEDY)
            run_all(core)
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        assert sequence.num_cached_tokens == 8 and core.runner.num_encoded == 2

    def test_a_found_prefix_behind_the_picture_still_sees_it(self):
        core = make_core(max_feature_bytes=0)
        inputs = media_inputs([1, (KEY, 9), *range(1, 12)])
        for num_encoded in (1, 1, 2):
            (sequence,) = core.add("a", inputs, GREEDY)
            run_all(core)
            assert sequence.output_token_ids == answer(inputs, GREEDY)
            assert core.runner.num_encoded == num_encoded
            if sequence.num_cached_tokens:
                core.resources.media.cross_cache.clear()
        assert sequence.num_cached_tokens == 12

    def test_one_that_comes_back_without_its_picture_waits_until_it_is_encoded_again(self):
        """All but its last token is found again, as if it was to decode; but another one's picture goes first."""
        core = make_core(max_encode_patches=12)  # 2 patches a state: one picture a step
        parts = [[1, (key, 5), 2, 3] for key in (KEY, b"l" * 16)]
        sequences = [core.add(str(i), media_inputs(items), greedy(12))[0] for i, items in enumerate(parts)]
        while sequences[1].num_tokens != 9:
            core.step()
        for sequence in reversed(sequences):
            core.scheduler._preempt(sequence)
        core.resources.media.cross_cache.clear()
        core.resources.media.features.clear()
        core.runner.states[:] = NOT_WRITTEN
        run_all(core)
        assert core.runner.num_encoded == 4
        for sequence in sequences:
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)


def test_prompt_logprobs_bound_the_rows_of_a_step():
    core = make_core(max_prompt_rows=4, max_tokens_per_step=64)
    (sequence,) = core.add("a", prompt(10), greedy(2, prompt_logprobs=0))
    run_all(core)
    assert [(start, count) for chunks in core.runner.steps for _, start, count in chunks][:3] == [
        (0, 4),
        (4, 4),
        (8, 2),
    ]
    assert len(sequence.prompt_logprobs) == 10


def test_drafts_never_pass_max_tokens_or_the_context():
    for options, max_tokens in (({}, 5), ({"max_context": 17}, None)):
        core = make_core(num_drafts=8, **options)
        core.add("a", text_inputs([1, 2, 3] * 4), greedy(max_tokens))
        while core.has_work:
            step = core.scheduler.schedule()
            for chunk in step.chunks:
                assert chunk.stop < 17
            core.scheduler.update(step, core.sampler.sample(core.runner.run(step), step))


@pytest.mark.parametrize("limits", [{"max_context": 0}, {"max_context": 9, "max_tokens_per_step": 3}])
def test_limits_are_checked(limits):
    with pytest.raises(ValueError, match="is "):
        StepLimits(**limits)
