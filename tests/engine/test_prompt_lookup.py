import pytest
from mock_model import answer, make_core, run_all, text_inputs

from tilewright.engine.draft.drafter import FIRST_PAUSE_TOKENS, TRIAL_DRAFTS, PromptLookupDrafter, num_accepted_drafts
from tilewright.engine.schedule.sequence import Sequence
from tilewright.types import SamplingParams

PENALIZED = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, repetition_penalty=1.1)


def sequence_of(token_ids):
    return Sequence("a", text_inputs(token_ids), SamplingParams())


@pytest.mark.parametrize(
    "token_ids, expected",
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 9, 2, 3, 4, 9, 1, 2, 3], [9, 2, 3, 4]),  # the longest n-gram, not the latest
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # of equal ones the latest
        ([7, 1, 2, 1, 2], [1, 2, 1, 2]),  # a repetition goes on
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 2], []),  # one token is no n-gram
        ([1], []),
    ],
)
def test_what_followed_the_longest_ngram(token_ids, expected):
    assert PromptLookupDrafter(4).propose(sequence_of(token_ids), 10) == expected
    assert PromptLookupDrafter(4).propose(sequence_of(token_ids), 2) == expected[:2]
    # Token by token the index is the same as built at once.
    growing, drafter = sequence_of(token_ids[:1]), PromptLookupDrafter(4)
    for token_id in token_ids[1:]:
        drafter.propose(growing, 10)
        growing.token_ids.append(token_id)
    assert drafter.propose(growing, 10) == expected


def test_a_sequence_whose_drafts_are_wrong_pauses_ever_longer():
    drafter, sequence = PromptLookupDrafter(4), sequence_of([1, 2, 3, 1, 2])
    pauses = []
    for _ in range(3):
        for _ in range(TRIAL_DRAFTS // 4):
            assert drafter.propose(sequence, 4)
            drafter.record(sequence, 4, 0)
        pause = 0
        while not drafter.propose(sequence, 4):
            sequence.token_ids += [1, 2]
            pause += 2
        pauses.append(pause)
    assert pauses == [FIRST_PAUSE_TOKENS, 2 * FIRST_PAUSE_TOKENS, 4 * FIRST_PAUSE_TOKENS]
    assert (drafter.num_proposed, drafter.num_accepted) == (3 * TRIAL_DRAFTS, 0)
    # Others are not concerned, and one good trial makes the next pause short again.
    assert drafter.propose(sequence_of([1, 2, 3, 1, 2]), 4)
    drafter.record(sequence, TRIAL_DRAFTS, TRIAL_DRAFTS // 4)
    assert drafter.propose(sequence, 4)


def test_only_right_drafts_count():
    assert num_accepted_drafts([], [5]) == 0
    assert num_accepted_drafts([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_accepted_drafts([1, 2, 3], [1, 9, 3, 4]) == 1
    assert num_accepted_drafts([1, 2], [3, 2, 1]) == 0


def test_histories_end_with_their_sequences():
    core = make_core(num_drafts=4)
    sequences = core.add("a", text_inputs([1, 2, 1, 2]), PENALIZED)
    run_all(core)
    assert sequences[0].output_token_ids == answer(sequences[0].inputs, sequences[0].params)
    kept = (core.scheduler.drafter._histories, core.sampler._occurrences, core._detokenizers)
    assert [len(item) for item in kept] == [1, 1, 1]
    sequences.clear()
    core.runner.steps.clear()
    assert [len(item) for item in kept] == [0, 0, 0]


def test_stop_in_the_middle_of_right_drafts():
    """Drafts may run past an eos or a stop string; the answer does not."""
    prompt = text_inputs([1, 2, 3, 4, 5, 6] * 3)
    whole = answer(prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    text = "".join(chr(96 + token_id) for token_id in whole)
    for stop in {text[index : index + 2] for index in range(len(text) - 1)}:
        core = make_core(num_drafts=6)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,), logprobs=0)
        (sequence,) = core.add("a", prompt, params)
        results = run_all(core)
        completion = core.completion(sequence)
        end = text.index(stop)
        assert completion.text == text[:end] == "".join(delta.text for _, delta in results)
        assert list(completion.token_ids) == whole[: end + 2]
        assert [item.token_id for item in completion.logprobs] == whole[: end + 2]
        assert completion.finish_reason == "stop" == results[-1][1].finish_reason
        assert core.resources.kv.pool.num_used == 0
