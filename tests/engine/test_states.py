"""Recurrent states: every answer is the one alone, and what was computed before is not computed again."""

import dataclasses
import itertools

import constrained_model
import hypothesis.strategies as st
import pytest
from fuzzing import num_cases
from hypothesis import given, settings
from mock_model import media_inputs, read_by, run_all, text_inputs
from recurrent_model import answer, check_nothing_is_held, recurrent_core
from test_answers import sampling, window_pages

from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.engine.draft.drafter import PromptLookupDrafter
from tilewright.engine.kv.state import OPENING_TOKENS
from tilewright.engine.loop import EngineLoop
from tilewright.types import Constraint, RequestError, SamplingParams


def greedy(max_tokens=8, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def prompt(length, first=1):
    return text_inputs([first + index % 7 for index in range(length)])


def ask(core, token_ids, params=None):
    """A request, answered; its sequence, and how many tokens were computed for it."""
    before = core.runner.model_runner.model.num_computed
    (sequence,) = core.add("a", text_inputs(token_ids), params or greedy())
    run_all(core)
    assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
    return sequence, core.runner.model_runner.model.num_computed - before


BLOCKS = [[5, 6, 7, 8], [5, 6, 7, 9], [7, 8, 5, 6]]


@st.composite
def prompts(draw):
    """Tokens, many with a beginning that others have too."""
    blocks = draw(st.lists(st.sampled_from(BLOCKS), max_size=8))
    return text_inputs([*itertools.chain(*blocks), *draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))])


@st.composite
def cores(draw):
    max_sequences = draw(st.integers(1, 5))
    page_size = draw(st.sampled_from([1, 4, 5]))
    return {
        "num_pages": draw(st.sampled_from([8, 10, 16, 40])),
        "page_size": page_size,
        "window_pages": draw(window_pages(page_size)),
        "num_slots": draw(st.sampled_from([1, 2, 3, 4, 6, 9, 20])),
        "prefix_cache": draw(st.sampled_from([True, True, False])),
        "num_drafts": draw(st.sampled_from([0, 1, 4])),
        "max_context": draw(st.sampled_from([50, 10_000])),
        "max_sequences": max_sequences,
        "max_tokens_per_step": max_sequences + draw(st.sampled_from([0, 1, 6, 100])),
        "max_rows_with_drafts": draw(st.sampled_from([4, 32])),
    }


requests = st.tuples(
    prompts(), sampling, st.integers(0, 30), st.none() | st.integers(0, 20), st.sampled_from([None, None, None, 1])
)


@settings(max_examples=num_cases(75), deadline=None)
@given(cores(), st.lists(requests, min_size=1, max_size=7))
def test_every_answer_is_the_one_alone(options, requests):
    core = recurrent_core(**options)
    scheduler = core.scheduler
    sequences = {}
    for number in range(5000):
        for name, (inputs, params, arrival, abort_after, prompt_logprobs) in enumerate(requests):
            if number == arrival:
                params = dataclasses.replace(params, prompt_logprobs=prompt_logprobs)
                if len(inputs.token_ids) >= scheduler.max_context:
                    with pytest.raises(RequestError, match=str(scheduler.max_context)):
                        core.add(str(name), inputs, params)
                else:
                    sequences[name] = core.add(str(name), inputs, params)
            if abort_after is not None and number == arrival + abort_after:
                core.abort(str(name))
        if number > 30 and not core.has_work:
            break
        core.step()
        assert (
            len(scheduler.running) == scheduler.resources.states.num_running <= scheduler.resources.states.max_running
        )
    assert not core.has_work
    for name, group in sequences.items():
        inputs, params, _, abort_after, prompt_logprobs = requests[name]
        for sequence in group:
            expected = answer(inputs, params, sequence.index, scheduler.max_context)
            output = sequence.output_token_ids
            if sequence.finish_reason == "abort":
                assert abort_after is not None and output == expected[: len(output)]
            else:
                assert output == expected
                assert prompt_logprobs is None or len(sequence.prompt_logprobs) == len(inputs.token_ids)
    check_nothing_is_held(core)


def test_the_mock_is_read_through_its_slots():
    """The test above could not fail if answers did not depend on what the slots hold."""
    core = recurrent_core()
    (sequence,) = core.add("a", prompt(6), greedy())
    core.step()
    core.runner.model_runner.states.delta_states[1][sequence.state_slots.read] += 1
    assert "goes on from another state" in str(core.step().failures["a"])


def test_stats():
    loop = EngineLoop(recurrent_core(num_slots=12), threaded=False)
    loop.submit(lambda: prompt(21), greedy(4))
    loop.step()
    stats = loop.stats()
    # It stands in its own slot after 21 tokens; states after 12 and 20 are kept.
    assert (stats.num_state_slots, stats.num_state_slots_used, stats.num_state_snapshots) == (12, 1, 2)
    loop.submit(lambda: prompt(21), greedy(4))
    while loop.step():
        pass
    stats = loop.stats()
    assert (stats.num_state_slots_used, stats.num_state_snapshots, stats.state_hit_rate) == (0, 2, 0.5)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 64])
def test_a_chunk_may_end_anywhere(tokens_per_step):
    core = recurrent_core(max_tokens_per_step=tokens_per_step, max_sequences=1)
    _, num_computed = ask(core, range(1, 20))
    assert num_computed == 19 + 7
    check_nothing_is_held(core)


def test_pieces_of_prompts_are_whole_pages_where_steps_are_large():
    core = recurrent_core(num_pages=200, max_tokens_per_step=38, max_sequences=4)
    sequences = [core.add(str(first), prompt(50, first), greedy(6))[0] for first in range(1, 5)]
    pieces = []
    while core.has_work:
        step = core.scheduler.schedule()
        pieces += [(chunk.start, chunk.stop) for chunk in step.chunks if chunk.stop <= 50]
        core.scheduler.update(step, core.sampler.sample(core.runner.run(step), step))
    assert all(start % 4 == 0 and (stop % 4 == 0 or stop == 50) for start, stop in pieces) and len(pieces) > 4
    for sequence in sequences:
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)


class TestSnapshots:
    def test_the_next_turn_computes_only_what_is_new(self):
        core = recurrent_core()
        first, _ = ask(core, range(1, 22), greedy(20))
        second, num_computed = ask(core, [*first.token_ids, 5, 6], greedy(4))
        assert second.num_cached_tokens == 40  # of the 40 that were computed
        assert num_computed == (21 + 20 + 2 - 40) + 3
        assert core.resources.states.hit_rate == 0.5
        check_nothing_is_held(core)

    def test_the_same_prompt_again(self):
        core = recurrent_core()
        ask(core, range(1, 22), greedy(20))
        again, num_computed = ask(core, range(1, 22), greedy(20))
        assert again.num_cached_tokens == (21 - OPENING_TOKENS) // 4 * 4 == 12
        assert num_computed == 21 - 12 + 19

    def test_a_next_turn_that_has_the_opening_otherwise(self):
        core = recurrent_core()
        first, _ = ask(core, range(1, 22), greedy(20))
        second, _ = ask(core, [*range(1, 19), 7, 7, 7, *first.output_token_ids], greedy(4))
        assert second.num_cached_tokens == 12

    def test_an_answer_has_one_however_long_it_is(self):
        core = recurrent_core()
        ask(core, range(1, 22), greedy(100))
        assert core.resources.states.num_snapshots == 2  # near the end of the prompt, and of the answer
        assert core.resources.kv.pool.num_named == 120 // 4

    def test_a_branching_point_is_kept_by_the_second_and_found_by_the_third(self):
        core = recurrent_core(num_pages=200)
        system = [1 + index % 5 for index in range(40)]
        counts = [ask(core, [*system, *([number] * 30)])[1] for number in (6, 7, 8, 9)]
        assert counts == [70 + 7, 70 + 7, 30 + 7, 30 + 7]
        check_nothing_is_held(core)

    def test_pages_that_are_computed_again_are_held_once(self):
        core = recurrent_core(num_pages=200)
        ask(core, [1] * 40 + [2] * 29, greedy(1))
        (sequence,) = core.add("b", text_inputs([1] * 40 + [3] * 29), greedy(9))
        core.step()
        assert sequence.num_cached_tokens == 0
        assert [core.resources.kv.pool.find(digest) for digest in sequence.page_digests] == sequence.pages[:17]
        run_all(core)
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        check_nothing_is_held(core)

    def test_taken_in_the_middle_of_a_chunk_and_at_its_end(self):
        for tokens_per_step in (12, 64):
            core = recurrent_core(max_tokens_per_step=tokens_per_step, max_sequences=2)
            ask(core, range(1, 22), greedy(1))
            again, _ = ask(core, range(1, 22), greedy(1))
            assert again.num_cached_tokens == 20  # no answer has taken the place of the prompt's last

    def test_read_by_several_at_once(self):
        core = recurrent_core()
        ask(core, range(1, 22), greedy(1))
        sequences = [core.add(str(number), text_inputs([*range(1, 21), number]), greedy(9))[0] for number in (1, 2, 3)]
        core.step()
        assert [sequence.num_cached_tokens for sequence in sequences] == [20, 20, 20]
        run_all(core)
        for sequence in sequences:
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        check_nothing_is_held(core)

    def test_the_least_recently_used_is_given_up(self):
        core = recurrent_core(num_pages=200, num_slots=8)
        for first in (1, 2, 3, 1, 4):
            ask(core, [first] * 20, greedy(1))  # two each
        assert core.resources.states.num_snapshots == 7
        assert [ask(core, [first] * 20, greedy(1))[0].num_cached_tokens for first in (1, 2)] == [16, 0]

    def test_pages_without_a_snapshot_are_no_hit_but_say_where_one_is_wanted(self):
        core = recurrent_core()
        ask(core, range(1, 22), greedy(1))
        states = core.resources.states
        for digest in list(states._slots._page_by_digest):
            states._slots.forget(digest)
        cached = [ask(core, range(1, 22), greedy(1))[0].num_cached_tokens for _ in range(2)]
        assert cached == [0, 20]

    def test_gone_with_its_page(self):
        core = recurrent_core(num_pages=6)
        ask(core, range(1, 22), greedy(1))
        assert core.resources.states.num_snapshots == 2
        ask(core, [9] * 7, greedy(1))  # takes the pages of tokens 20 .. 21 and 16 .. 20
        assert core.resources.kv.pool.num_named == 4 + 1 and core.resources.states.num_snapshots == 2
        again, _ = ask(core, range(1, 22), greedy(1))
        assert again.num_cached_tokens == 12
        check_nothing_is_held(core)

    def test_other_positions_are_another_state(self):
        core = recurrent_core()
        inputs = prompt(21)
        for shifted in (inputs, dataclasses.replace(inputs, positions=inputs.positions + 1, next_position=22)):
            (sequence,) = core.add("a", shifted, greedy())
            run_all(core)
            assert sequence.num_cached_tokens == 0 and sequence.output_token_ids == answer(shifted, greedy())

    def test_none_without_a_prefix_cache(self):
        core = recurrent_core(prefix_cache=False, num_drafts=4)
        for _ in range(2):
            sequence, _ = ask(core, [1, 2, 3] * 8, greedy(30))
        states = core.resources.states
        assert states.num_snapshots == states.num_lookups == sequence.num_cached_tokens == 0
        check_nothing_is_held(core)

    def test_prompt_logprobs_are_computed_from_the_start_and_leave_snapshots(self):
        core = recurrent_core(max_prompt_rows=5)
        for _ in range(2):
            sequence, num_computed = ask(core, range(1, 22), greedy(2, prompt_logprobs=0))
            assert len(sequence.prompt_logprobs) == 21 and num_computed == 22
        assert ask(core, range(1, 22), greedy(2))[0].num_cached_tokens == 20


class TestDrafts:
    @pytest.mark.parametrize("num_slots", [3, 4, 6, 40])
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_right_wrong_and_partly_right(self, num_slots, temperature):
        core = recurrent_core(num_slots=num_slots, num_drafts=4)
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=120, ignore_eos=True)
        ask(core, [1, 2, 3, 4, 1, 2, 3, 4], params)
        drafter = core.scheduler.drafter
        assert 0 < drafter.num_accepted < drafter.num_proposed
        check_nothing_is_held(core)

    def test_each_has_a_slot_of_its_own(self):
        core = recurrent_core(num_slots=12, num_drafts=9)
        core.add("a", text_inputs([1, 2, 3] * 6), greedy(60))
        most = 0
        while core.has_work:
            step = core.scheduler.schedule()
            for chunk in step.chunks:
                kept = chunk.sequence.state_slots.kept
                first = chunk.stop - chunk.num_drafts
                assert set(range(first, chunk.stop + 1)) <= set(kept) and len(set(kept.values())) == len(kept)
                most = max(most, chunk.num_drafts)
            core.scheduler.update(step, core.sampler.sample(core.runner.run(step), step))
        assert most == core.resources.states.max_drafts_per_step == 3

    def test_none_while_no_slot_is_free(self):
        core = recurrent_core(num_slots=8)
        sequences = [core.add(str(first), text_inputs([first, first, first]), greedy(20))[0] for first in range(1, 5)]
        for _ in range(2):
            core.step()
        states = core.resources.states  # all stand at snapshots, and have a slot of their own besides
        assert all(sequence.num_computed_tokens == 4 for sequence in sequences) and states.num_free == 0
        core.scheduler.drafter = PromptLookupDrafter(2)
        assert all(chunk.num_drafts == 0 for chunk in core.scheduler.schedule().chunks)
        for sequence in sequences:
            core.scheduler._preempt(sequence)
        run_all(core)
        assert core.scheduler.drafter.num_proposed
        for sequence in sequences:
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        check_nothing_is_held(core)

    def test_a_page_that_drafts_fill_is_found_again(self):
        for num_drafts in (0, 4):
            core = recurrent_core(num_drafts=num_drafts)
            first, _ = ask(core, [1, 2, 3] * 4, greedy(33))
            assert not num_drafts or core.scheduler.drafter.num_accepted
            second, _ = ask(core, [*first.token_ids, 5, 6, 7, 8], greedy(4))
            assert second.num_cached_tokens == 44

    def test_a_stop_in_the_middle_of_right_drafts(self):
        inputs = text_inputs([1, 2, 3, 4, 5, 6] * 3)
        whole = answer(inputs, greedy(40))
        for stop in sorted(set(whole)):
            core = recurrent_core(num_drafts=6)
            (sequence,) = core.add("a", inputs, greedy(40, stop_token_ids=(stop,)))
            run_all(core)
            assert sequence.output_token_ids == whole[: whole.index(stop) + 1]
            check_nothing_is_held(core)

    def test_forced_by_a_grammar(self):
        tokenizer, size = constrained_model.byte_tokenizer(), constrained_model.BYTES_SIZE
        inputs = constrained_model.prompt(tokenizer)
        constraint = Constraint("regex", r'\{"forced": [0-9]{3}, "more": [ab]{5}\}')
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, constraint=constraint)
        outputs = []
        for num_slots in (1, 3, 8, 60):
            core = recurrent_core(
                num_slots=num_slots,
                vocabulary_size=size,
                num_axes=1,
                make_token_decoder=tokenizer.stream,
                eos_token_ids=tokenizer.stop_token_ids,
                constraints=ConstraintCompiler(tokenizer, size),
            )
            (sequence,) = constrained_model.add(core, "a", inputs, params)
            num_steps = 0
            while core.has_work:
                core.step()
                num_steps += 1
            outputs.append(sequence.output_token_ids)
            assert tokenizer.decode(sequence.output_token_ids).startswith('{"forced": ')
            assert (num_steps < len(sequence.output_token_ids)) == (core.resources.states.max_drafts_per_step > 0)
            check_nothing_is_held(core)
        assert all(output == outputs[0] for output in outputs)


class TestScarcity:
    @pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
    def test_those_without_a_slot_wait(self, num_slots):
        core = recurrent_core(num_slots=num_slots)
        sequences = [core.add(str(first), prompt(9 + first, first), greedy(12))[0] for first in range(1, 6)]
        most = 0
        while core.has_work:
            core.step()
            most = max(most, len(core.scheduler.running))
        assert most == max(1, num_slots // 2) == core.resources.states.max_running
        for sequence in sequences:
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        assert [item.started_s for item in sequences] == sorted(item.started_s for item in sequences)
        check_nothing_is_held(core)

    def test_the_only_slot_is_taken_over_with_what_it_holds(self):
        core = recurrent_core(num_slots=2)
        ask(core, range(1, 22), greedy(1))
        slots = core.resources.states._slots
        held = slots.allocate()
        assert slots.num_named == slots.num_free == 1
        again, num_computed = ask(core, range(1, 22), greedy(1))
        assert again.num_cached_tokens == 12 and num_computed == 21 - 12
        assert slots.num_named == 0
        slots.release([held])
        check_nothing_is_held(core)

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_preemption_loses_nothing(self, prefix_cache):
        core = recurrent_core(num_pages=12, num_drafts=3, prefix_cache=prefix_cache)
        params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(4)]
        sequences = [core.add(str(item.seed), text_inputs([1 + item.seed, 2, 3, 2, 3]), item)[0] for item in params]
        preempted = set()
        while core.has_work:
            core.step()
            for sequence in core.scheduler.waiting:
                assert sequence.state_slots is None and not sequence.pages
                preempted.add(sequence.num_output_tokens > 0)
        assert core.scheduler.num_preemptions > 0 and True in preempted
        for sequence in sequences:
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        check_nothing_is_held(core)

    def test_a_prompt_that_is_preempted_or_aborted_in_the_middle_goes_on_from_there(self):
        core = recurrent_core(max_tokens_per_step=14, max_sequences=2)
        (sequence,) = core.add("a", prompt(40), greedy())
        for _ in range(2):
            core.step()
        assert sequence.num_computed_tokens == 24  # whole pages of 14 tokens
        core.scheduler._preempt(sequence)
        core.step()
        core.abort("a")
        again, num_computed = ask(core, prompt(40).token_ids, greedy())
        assert again.num_cached_tokens == 36 and num_computed == 40 - 36 + 7
        assert core.runner.model_runner.model.num_computed == 40 + 7
        check_nothing_is_held(core)

    def test_a_snapshot_that_was_lost_is_taken_again(self):
        core = recurrent_core()
        (sequence,) = core.add("a", prompt(9), greedy(20))
        while sequence.num_computed_tokens < 18:
            core.step()
        states = core.resources.states
        states._slots.forget(sequence.last_snapshot)
        core.scheduler._preempt(sequence)
        core.step()
        assert states._slots.find(sequence.last_snapshot) is not None
        run_all(core)
        assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
        check_nothing_is_held(core)

    def test_a_preempted_one_goes_on_from_its_last_snapshot(self):
        core = recurrent_core(num_pages=14)
        (first,) = core.add("a", prompt(9), greedy(40))
        (second,) = core.add("b", prompt(9, first=8), greedy(12))
        for _ in range(10):
            core.step()
        before = core.runner.model_runner.model.num_computed
        core.scheduler._preempt(second)
        run_all(core)
        # Its last page's worth at most, besides what was to come.
        assert core.runner.model_runner.model.num_computed - before <= (40 - 10) + (12 - 10) + 4
        for sequence in (first, second):
            assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)


@pytest.mark.parametrize("num_slots", [1, 2, 4, 32])
def test_three_answers_to_one_prompt(num_slots):
    core = recurrent_core(num_slots=num_slots, num_drafts=2)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=15, ignore_eos=True, n=3)
    sequences = core.add("a", prompt(21), params)
    run_all(core)
    assert len({tuple(sequence.output_token_ids) for sequence in sequences}) == 3
    for sequence in sequences:
        assert sequence.output_token_ids == answer(sequence.inputs, params, sequence.index)
    if num_slots == 32:
        assert [sequence.num_cached_tokens for sequence in sequences] == [0, 20, 20]
    check_nothing_is_held(core)


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_gives_everything_back(num_steps):
    core = recurrent_core(num_drafts=4, max_tokens_per_step=16, max_sequences=4)
    core.add("a", prompt(23), greedy(50, n=3))
    core.add("b", text_inputs([1, 2, 3] * 5), greedy(50))
    for _ in range(num_steps):
        core.step()
    core.abort("a")
    core.abort("b")
    assert not core.has_work
    check_nothing_is_held(core)


@pytest.mark.parametrize("num_computed", [3, 12, 30, 36])
def test_a_step_that_fails(num_computed):
    core = recurrent_core(num_drafts=4)
    core.add("a", text_inputs([1, 2, 3] * 4), greedy(30))
    core.add("b", text_inputs([1, 2, 3] * 5), greedy(30))
    core.runner.model_runner.model.fails_at = num_computed
    failures = {}
    while core.has_work:
        failures |= core.step().failures
    assert set(failures) == {"a", "b"} and "out of luck" in str(failures["a"])
    check_nothing_is_held(core)


def test_what_a_failed_step_has_written_is_not_found_again():
    core = recurrent_core(max_tokens_per_step=8, max_sequences=2)
    (sequence,) = core.add("a", prompt(40), greedy(4))
    core.step()
    assert sequence.num_computed_tokens == 8 and sequence.state_slots.read == sequence.state_slots.own
    core.runner.model_runner.model.fails_at = 15  # once the state after 16 tokens is in the place of that after 8
    assert "out of luck" in str(core.step().failures["a"])
    core.runner.model_runner.model.fails_at = None
    assert ask(core, prompt(40).token_ids, greedy(4))[0].num_cached_tokens == 0
    check_nothing_is_held(core)


def unreadable():
    raise ValueError("no picture")


@pytest.mark.parametrize(
    "parts",
    [
        [1, (b"k" * 16, [3]), 2],
        # The second medium comes a step later, and what is before it is less than a page: so far, no token is computed.
        [1, (b"k" * 16, [1]), (b"l" * 16, [3]), 2],
    ],
)
def test_a_medium_that_cannot_be_read_does_not_hold_up_the_others_of_its_step(parts):
    core = recurrent_core(num_drafts=4, num_axes=2, max_encode_patches=1)
    (sequence,) = core.add("a", media_inputs([1, 2, 3] * 4), greedy(30))
    for _ in range(4):
        core.step()
    core.add("b", read_by(core, media_inputs(parts), unreadable), greedy(3))
    num_tokens = sequence.num_tokens
    failures = core.step().failures
    assert list(failures) == ["b"] and "no picture" in str(failures["b"])
    assert sequence.num_tokens > num_tokens and core.scheduler.running == [sequence]
    run_all(core)
    assert sequence.output_token_ids == answer(sequence.inputs, sequence.params)
    check_nothing_is_held(core)


@pytest.mark.parametrize("num_others", [1, 2, 6])
def test_a_step_that_fails_for_one_sequence_is_computed_again_for_the_others(num_others):
    """States may have been half written: they are computed again from what is cached."""
    core = recurrent_core(num_drafts=4, max_sequences=8)
    others = [core.add(str(index), prompt(9 + index, first=index + 1), greedy(12))[0] for index in range(num_others)]
    (culprit,) = core.add("culprit", prompt(20), greedy(12))
    for _ in range(3):
        core.step()
    run = core.runner.run

    def fails_for_one(step):
        if any(chunk.sequence is culprit for chunk in step.chunks):
            raise ArithmeticError("the kernel said no")
        return run(step)

    core.runner.run = fails_for_one
    failures = core.step().failures
    assert list(failures) == ["culprit"] and "the kernel said no" in str(failures["culprit"])
    assert core.scheduler.waiting == others
    run_all(core)
    assert [item.output_token_ids for item in others] == [answer(item.inputs, item.params) for item in others]
    check_nothing_is_held(core)


def test_a_step_whose_failure_is_nobodys_alone_fails_for_all_where_states_are_lost():
    core = recurrent_core()
    sequences = [core.add(name, prompt(9), greedy(12))[0] for name in "ab"]
    run = core.runner.run

    def fails_for_several(step):
        if len(step.chunks) > 1:
            raise MemoryError("too many")
        return run(step)

    core.runner.run = fails_for_several
    assert set(core.step().failures) == {"a", "b"} and all(sequence.is_finished for sequence in sequences)
    check_nothing_is_held(core)
