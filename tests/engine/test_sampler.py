import hashlib
import math

import numpy as np
import pytest
import torch
from mock_model import (
    VOCABULARY_SIZE,
    absorb,
    answer,
    features_of,
    logits_of,
    make_core,
    media_inputs,
    run_all,
    text_inputs,
)

from tilewright.engine.sample.sampler import Sampler, uniform
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import Chunk, Step
from tilewright.types import SamplingParams


def decoding(params, prompt=(1, 2, 3), output=(4,), drafts=()):
    """A sequence that has computed all but its last token, and its chunk."""
    (sequence,) = Sequence.for_request("a", text_inputs(prompt), params, eos_token_ids=[0])
    sequence.token_ids += output
    sequence.num_computed_tokens = sequence.num_tokens - 1
    return Chunk(sequence, sequence.num_computed_tokens, 1 + len(drafts), drafts)


def random_logits(rows, width=VOCABULARY_SIZE, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_is_the_argmax_and_leaves_the_logits_alone():
    logits = random_logits(70)
    step = Step([decoding(SamplingParams(temperature=0.0)) for _ in range(70)])
    sampled = Sampler().sample(logits, step)
    assert [item.token_ids for item in sampled] == logits.argmax(1, keepdim=True).tolist()
    assert torch.equal(logits, random_logits(70))


def test_no_rows():
    (sequence,) = Sequence.for_request("a", text_inputs([1, 2, 3]), SamplingParams())
    sampled = Sampler().sample(torch.empty(0, VOCABULARY_SIZE), Step([Chunk(sequence, 0, 2)]))
    assert [(item.token_ids, item.logprobs, item.prompt_logprobs) for item in sampled] == [([], [], [])]


def test_uniform_numbers_are_their_own_for_every_seed_answer_and_position():
    params = SamplingParams(n=2, seed=5)
    first, second = Sequence.for_request("a", text_inputs([1]), params)
    (other,) = Sequence.for_request("a", text_inputs([1]), SamplingParams(seed=-5))
    numbers = [uniform(sequence, position) for sequence in (first, second, other) for position in range(1000)]
    assert len(set(numbers)) == 3000 and all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02 and abs(np.var(numbers) - 1 / 12) < 0.005
    assert uniform(Sequence("b", text_inputs([2, 3]), params, seed=5), 17) == uniform(first, 17)


def test_without_a_seed_every_request_has_its_own():
    seeds = {Sequence.for_request("a", text_inputs([1]), SamplingParams())[0].seed for _ in range(10)}
    assert len(seeds) == 10


def test_min_tokens_forbid_eos_and_stop_ids():
    logits = random_logits(3)
    logits[:, 5] = 30.0
    logits[:, 9] = 40.0
    logits[:, 0] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,))
    # One token so far: neither the next nor the one after a right draft may stop, but the one after two may.
    (sampled,) = Sampler().sample(logits, Step([decoding(params, drafts=[5, 5])]))
    assert sampled.token_ids == [5, 5, 0]


def test_logit_bias_and_the_rows_beside_it():
    logits = random_logits(2)
    expected = int(logits[1].argmax())
    plain, biased = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias={5: 100.0})
    first, second = Sampler().sample(logits, Step([decoding(biased), decoding(plain)]))
    assert first.token_ids == [5] and second.token_ids == [expected]


def test_penalties_count_the_drafts_before_a_row():
    # Token 7 leads by 1.5, and each time it is there it loses 1: a second time it comes, a third time it does not.
    logits = torch.zeros(3, VOCABULARY_SIZE)
    logits[:, 7] = 1.5
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    (sampled,) = Sampler().sample(logits, Step([decoding(params, prompt=(7, 7), output=(4,), drafts=[7, 7])]))
    assert sampled.token_ids == [7, 7, 0]


def test_tokens_past_the_head_are_no_trouble():
    """A placeholder may be in the embedding and not in the head, and eos ids may be more than there are."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, min_tokens=5, logit_bias={23: 1.0}, stop_token_ids=(22,)
    )
    chunk = decoding(params, prompt=(1, 23, 22), drafts=[21])
    (sampled,) = Sampler().sample(random_logits(2, width=20), Step([chunk]))
    assert 0 < sampled.token_ids[0] < 20


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_logprobs_are_those_of_the_raw_logits(penalty):
    params = SamplingParams(temperature=0.0, logprobs=3, presence_penalty=penalty, logit_bias={4: -100.0})
    logits = random_logits(2)
    truth = logits.log_softmax(1)
    without, (asked) = Sampler().sample(logits, Step([decoding(SamplingParams(temperature=1.0)), decoding(params)]))
    assert without.logprobs == []
    (found,) = asked.logprobs
    assert found.token_id == asked.token_ids[0]
    assert found.logprob == pytest.approx(float(truth[1, found.token_id]), abs=1e-5)
    assert found.rank == 1 + int((truth[1] > truth[1, found.token_id]).sum())
    best = truth[1].topk(3)
    assert [token_id for token_id, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_prompt_logprobs_whatever_the_chunks():
    inputs = media_inputs([1, 2, (b"k" * 16, [4]), 3, 4, 5])
    state = hashlib.blake2b()
    features = iter(features_of(b"k" * 16, 4))
    expected = []
    for position, token_id in enumerate(inputs.token_ids):
        if position:
            row = torch.from_numpy(logits_of(state, list(inputs.token_ids[:position]))).log_softmax(0)
            expected.append(float(row[token_id]))
        absorb(state, token_id, next(features) if token_id == 23 else None, inputs.positions[:, position])
    for limits in ({}, {"max_tokens_per_step": 3, "max_sequences": 3}, {"max_prompt_rows": 2}):
        core = make_core(page_size=2, **limits)
        params = SamplingParams(temperature=0.0, max_tokens=3, n=2, logprobs=0, prompt_logprobs=2)
        for _ in range(2):  # the second time all pages are stored
            sequences = core.add("a", inputs, params)
            run_all(core)
            for sequence in sequences:
                completion = core.completion(sequence)
                first, *rest = completion.prompt_logprobs
                assert first is None and [item.token_id for item in rest] == list(inputs.token_ids[1:])
                assert [item.logprob for item in rest] == pytest.approx(expected, abs=1e-5)
                assert all(len(item.top) == 2 for item in rest)
                assert completion.token_ids == tuple(answer(inputs, params, sequence.index))
                assert [item.token_id for item in completion.logprobs] == list(completion.token_ids)


def test_prompt_logprobs_of_a_token_past_the_head():
    (sequence,) = Sequence.for_request("a", text_inputs([1, 23, 2]), SamplingParams(prompt_logprobs=1, seed=1))
    (sampled,) = Sampler().sample(random_logits(3, width=20), Step([Chunk(sequence, 0, 3)]))
    past, other = sampled.prompt_logprobs
    assert (past.token_id, past.logprob, past.rank) == (23, -math.inf, 20)
    assert other.token_id == 2 and math.isfinite(other.logprob) and len(sampled.token_ids) == 1
