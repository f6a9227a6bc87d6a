"""What goes wrong with one sequence ends its request alone, in whichever stage of a step it does."""

import math

import pytest
from mock_model import LetterDecoder, answer, make_core, media_inputs, run_all, text_inputs

from tilewright.engine.handle import EngineError
from tilewright.engine.loop import EngineLoop
from tilewright.types import SamplingParams

CULPRIT = 7  # its prompt begins with this token


def greedy(max_tokens=10, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def is_culprit(sequence):
    return sequence.token_ids[0] == CULPRIT


def fail_for_culprit(owner, name, sequences_of, after=0):
    """Lets a method raise for calls that the culprit is part of, from the (after + 1)-th of those on."""
    method, num_calls = getattr(owner, name), 0

    def failing(*arguments):
        nonlocal num_calls
        if any(is_culprit(sequence) for sequence in sequences_of(*arguments)):
            num_calls += 1
            if num_calls > after:
                raise ArithmeticError(f"{name} said no")
        return method(*arguments)

    setattr(owner, name, failing)


def chunks_of(*arguments):
    return [chunk.sequence for chunk in arguments[-1].chunks]


def first_of(sequence, *_):
    return [sequence]


STAGES = {
    "match": lambda core: (core.resources.kv.prefix_cache, "match", first_of),
    "propose": lambda core: (core.scheduler.drafter, "propose", first_of),
    "run": lambda core: (core.runner, "run", chunks_of),
    "sample": lambda core: (core.sampler, "sample", chunks_of),
    "store": lambda core: (core.resources.kv.prefix_cache, "store", first_of),
    "_finish_reason": lambda core: (core.scheduler, "_finish_reason", first_of),
    "_delta": lambda core: (core, "_delta", lambda event: [event.sequence]),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_in_any_stage_is_its_sequence_s_alone(stage, after, n):
    """Seeds, penalties and log-probabilities among the others: what they draw does not change by being drawn again."""
    loop = EngineLoop(make_core(num_drafts=3, max_tokens_per_step=100), threaded=False)
    if stage == "match" and after:
        after = 0  # it is matched once, when it is admitted
    fail_for_culprit(*STAGES[stage](loop.core), after)
    options = [
        greedy(),
        greedy(logprobs=2, presence_penalty=1.0),
        SamplingParams(max_tokens=10, ignore_eos=True, seed=5, n=2, repetition_penalty=1.5),
        greedy(prompt_logprobs=1, logit_bias={3: 2.0}),
    ]
    prompts = [text_inputs([1 + index, 2, 3, 2, 3, 2]) for index in range(len(options))]
    bad = loop.submit(lambda: text_inputs([CULPRIT, 2, 3, 2, 3, 2, 3]), greedy(30, n=n))
    good = [loop.submit(lambda inputs=inputs: inputs, params) for inputs, params in zip(prompts, options, strict=True)]
    while loop.step():
        pass
    with pytest.raises(EngineError, match=f"{stage} said no") as caught:
        bad.result(0)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    for handle, inputs, params in zip(good, prompts, options, strict=True):
        for index, completion in enumerate(handle.result(0)):
            assert list(completion.token_ids) == answer(inputs, params, index)
    assert loop.stats().num_pages_used == 0 and not loop._handles and not loop.core.has_work


def test_one_among_many_is_found_by_halves():
    core = make_core(num_pages=300, max_tokens_per_step=300)
    others = [core.add(str(index), text_inputs([1, 2, 3]), greedy(4))[0] for index in range(31)]
    core.add("culprit", text_inputs([CULPRIT, 2, 3]), greedy(4))
    fail_for_culprit(core.runner, "run", chunks_of)
    assert list(core.step().failures) == ["culprit"]
    assert len(core.runner.steps) == 5  # the halves without it, of 16, 8, 4, 2 and 1
    run_all(core)
    assert {tuple(item.output_token_ids) for item in others} == {tuple(answer(others[0].inputs, greedy(4)))}


def test_a_batch_that_fails_only_together_is_computed_in_parts():
    core = make_core()
    sequences = [core.add(str(index), text_inputs([1 + index, 2, 3]), greedy(6))[0] for index in range(5)]
    run = core.runner.run

    def fails_for_several(step):
        if len(step.chunks) > 2:
            raise MemoryError("too many")
        return run(step)

    core.runner.run = fails_for_several
    run_all(core)
    assert [item.output_token_ids for item in sequences] == [answer(item.inputs, item.params) for item in sequences]


def test_a_picture_that_the_encoder_cannot_take_fails_its_request_alone():
    """It can be read; others have pictures in the same step, and one looks at it from outside."""
    core = make_core(max_tokens_per_step=100)
    encode = core.runner.encode

    def fails_for_one(media):
        if any(medium.key == b"k" * 16 for medium in media):
            raise ArithmeticError("the encoder said no")
        encode(media)

    core.runner.encode = fails_for_one
    (bad,) = core.add("bad", media_inputs([1, (b"k" * 16, [5]), 2]), greedy())
    parts = ([3, (b"m" * 16, [4]), 2], [3, (b"n" * 16, 6), 2], [4, 5])
    good = [core.add(str(index), media_inputs(items), greedy())[0] for index, items in enumerate(parts)]
    assert list(core.step().failures) == ["bad"] and bad.finish_reason == "abort"
    run_all(core)
    assert [item.output_token_ids for item in good] == [answer(item.inputs, item.params) for item in good]
    assert core.resources.kv.pool.num_used == 0 and not core.resources.media.features._pins


def test_a_decoder_that_fails_ends_its_request_and_not_the_thread():
    decoders = iter([LetterDecoder(), LetterDecoder()])
    core = make_core(make_token_decoder=lambda: next(decoders))
    loop = EngineLoop(core, threaded=False)
    broken = loop.submit(lambda: text_inputs([1, 2]), greedy(50, stop=("no",)))
    good = loop.submit(lambda: text_inputs([3, 2]), greedy())
    loop.step()
    (sequence,) = (item for item in core.scheduler.running if item.token_ids[0] == 1)
    core._detokenizers[sequence]._decoder.flush = lambda: 1 / 0
    broken.abort()
    while loop.step():
        pass
    with pytest.raises(EngineError, match="division by zero"):
        broken.result(0)
    assert list(good.result(0)[0].token_ids) == answer(text_inputs([3, 2]), greedy())
    refused = loop.submit(lambda: text_inputs([3, 2]), greedy())  # there is no third decoder
    assert not loop.step() and not core.has_work
    with pytest.raises(StopIteration):
        refused.result(0)


@pytest.mark.parametrize(
    "options",
    [
        greedy(30),
        greedy(30, logprobs=3, prompt_logprobs=1, logit_bias={3: 5.0}),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=1, top_k=5, presence_penalty=1.0, min_tokens=5),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_end_their_request_alone(options, after, value):
    loop = EngineLoop(make_core(num_drafts=3, max_tokens_per_step=100), threaded=False)
    run = loop.core.runner.run

    def poisoned(step):
        logits, first = run(step), 0
        for chunk in step.chunks:
            if is_culprit(chunk.sequence) and chunk.sequence.num_output_tokens >= after:
                logits[first : first + chunk.num_logits] = value
            first += chunk.num_logits
        return logits

    loop.core.runner.run = poisoned
    bad = loop.submit(lambda: text_inputs([CULPRIT, 2, 3, 2, 3, 2, 3]), options)
    good = loop.submit(lambda: text_inputs([1, 2, 3, 2, 3]), options)
    while loop.step():
        pass
    with pytest.raises(EngineError, match=r"the model's logits of token \d+ are not numbers \(NaN\)"):
        bad.result(0)
    assert sum(len(delta.token_ids) for delta in bad._deltas) >= after
    assert list(good.result(0)[0].token_ids) == answer(text_inputs([1, 2, 3, 2, 3]), options)
    assert loop.stats().num_pages_used == 0


def test_a_row_with_some_numbers_has_a_token():
    core = make_core()
    run = core.runner.run

    def half_poisoned(step):
        logits = run(step)
        logits[:, ::2] = math.nan
        logits[:, 5] = math.inf
        return logits

    core.runner.run = half_poisoned
    (sequence,) = core.add("a", text_inputs([1, 2]), greedy(4))
    run_all(core)
    assert sequence.output_token_ids == [5] * 4
