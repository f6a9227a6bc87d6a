"""A model split over any number of ranks computes what one rank does: all families, sizes that divide nothing."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_qwen3_5
import torch
from core_answers import CoreAnswers
from rank_threads import RankThreads

from tilewright import config
from tilewright.types import ModelInputs, SamplingParams

SIZES = (2, 3, 4, 6)
# This random network has the same distance to transformers' on one rank: it makes more of every rounding.
TOLERANCES = {"qwen3_5_moe": 3e-5}
FAMILIES = [*tiny.FAMILIES, *tiny_qwen3_5.FAMILIES]
# Attention, experts, cross-attention and recurrent heads at every size. The other families are made of the same parts:
# they are split by three, which divides nothing.
CASES = [(name, size) for name in ("qwen3_vl", "qwen3_moe", "mllama", "qwen3_5", "qwen3_next") for size in SIZES]
CASES += [(name, 3) for name in FAMILIES if (name, 3) not in CASES]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# So few words that an answer repeats itself, and drafts are taken.
FEW_WORDS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias={5: 100.0, 9: 100.0})


def prompts_for(family, hf, dtype):
    if family in tiny.CROSS_FAMILIES:
        found = [tiny.text_prompt(40, 1), tiny.cross_prompt([4, (1, 2), 9], 4)]
        found.append(tiny.cross_prompt([(2, 2), 30, (1, 1), (1, 3), 5], 5))
    elif family in (*tiny.VISION_FAMILIES, *tiny_qwen3_5.SEEING):
        found = [tiny.text_prompt(40, 1, num_axes=3), tiny.media_prompt(hf, [("image", (1, 6, 8))], 2)]
        found.append(tiny.media_prompt(hf, [("video", (3, 4, 6)), ("image", (1, 8, 4))], 4))
    else:
        found = [tiny.text_prompt(70, 1), tiny.text_prompt(1, 2), tiny.text_prompt(33, 3)]
    return [tiny.in_dtype(prompt.inputs, dtype) for prompt in found]


class Recorded(CoreAnswers):
    """Keeps the logits of every step."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, page_size=32, **options)
        self.logits = []
        run = self.core.runner.run

        def kept(step):
            logits = run(step)
            self.logits.append(logits.clone())
            return logits

        self.core.runner.run = kept


def answers(networks, family, size, dtype, params, block=1, **options):
    hf, folder = networks(family)
    ranks = RankThreads(folder, dtype, size, block=block)
    try:
        core = Recorded(ranks.model, dtype, ranks=ranks.session(), **options)
        return core.to(prompts_for(family, hf, dtype), params), core
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def of_one_rank(networks):
    known = {}

    def computed(family, dtype, params, **options):
        key = family, dtype, params.max_tokens, *options.items()
        if key not in known:
            known[key] = answers(networks, family, 1, dtype, params, **options)
        return known[key]

    return computed


@pytest.mark.parametrize(("family", "size"), CASES)
def test_logits_are_those_of_one_rank(family, size, networks, of_one_rank):
    check_logits(family, size, networks, of_one_rank)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "mllama", "qwen3_5", "qwen3_next"])
def test_blocks_that_share_a_scale_stay_together(family, size, networks, of_one_rank):
    check_logits(family, size, networks, of_one_rank, block=32)


def check_logits(family, size, networks, of_one_rank, **options):
    expected_tokens, expected = of_one_rank(family, torch.float32, GREEDY)
    tokens, found = answers(networks, family, size, torch.float32, GREEDY, **options)
    assert tokens == expected_tokens
    assert len(found.logits) == len(expected.logits)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= TOLERANCES.get(family, 1e-5) * theirs.norm()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def test_bf16_is_as_near_as_rounding_lets_it(family, size, networks, of_one_rank):
    """Partial sums are fp32 and rounded once: nearer to one rank in bf16 than that is to fp32."""
    exact = of_one_rank(family, torch.float32, GREEDY)[1].logits[0]
    alone = of_one_rank(family, torch.bfloat16, GREEDY)[1].logits[0]
    found = answers(networks, family, size, torch.bfloat16, GREEDY)[1].logits[0]
    assert (found - exact).abs().max() <= 1.5 * (alone - exact).abs().max()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_next"])
def test_drafts_are_those_of_one_rank(family, size, networks, of_one_rank):
    expected_tokens, expected = of_one_rank(family, torch.float32, FEW_WORDS, drafts=3)
    tokens, found = answers(networks, family, size, torch.float32, FEW_WORDS, drafts=3)
    assert tokens == expected_tokens
    assert found.scheduler.drafter.num_accepted == expected.scheduler.drafter.num_accepted > 0


def test_padding_is_told_once_by_the_first_rank(networks, caplog):
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        answers(networks, "qwen3_vl", 3, torch.float32, GREEDY)
    (padded,) = [record.message for record in caplog.records if "divide" in record.message]
    assert "attention heads 4 to 6, attention KV heads 2 to 3" in padded and "vocabulary 211 to 213" in padded
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        answers(networks, "qwen3_vl", 4, torch.float32, GREEDY)
    _, copied = [record.message for record in caplog.records if "divide" in record.message]
    assert "kept by each rank that reads them: attention KV heads 2 to 4" in copied
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        answers(networks, "qwen3_moe", 1, torch.float32, GREEDY)
    assert not [record for record in caplog.records if "divide" in record.message]


def test_every_rank_has_its_part_alone(networks):
    """The bytes of all ranks together are those of one, but for padding and what is small."""
    _, folder = networks("qwen3_vl_moe")
    whole, parts = (
        [sum(_bytes_of(network.model)) for network in RankThreads(folder, torch.float32, size).networks]
        for size in (1, 2)
    )
    assert sum(parts) < 1.25 * whole[0] and max(parts) < 0.65 * whole[0]


def _bytes_of(model):
    from tilewright.weights.spec import iter_weights

    for weight in iter_weights(model):
        for value in vars(weight.value).values() if hasattr(weight.value, "still") else [weight.value]:
            yield value.nbytes if isinstance(value, torch.Tensor) else value.data.nbytes


def test_each_rank_finds_its_own_part_in_the_pack_cache(networks, of_one_rank, tmp_path):
    hf, folder = networks("qwen3_5")
    expected = of_one_rank("qwen3_5", torch.float32, GREEDY)[1].logits[0]
    config.use(replace(config.current(), cache_dir=tmp_path))
    try:
        for is_second in (False, True):
            ranks = RankThreads(folder, torch.float32, 2, pack_cache=True)
            assert [network.report.from_cache for network in ranks.networks] == [is_second] * 2
            core = Recorded(ranks.model, torch.float32, ranks=ranks.session())
            core.to(prompts_for("qwen3_5", hf, torch.float32), GREEDY)
            ranks.close()
            assert (core.logits[0] - expected).norm() <= 1e-5 * expected.norm()
    finally:
        config.use(None)


def test_a_step_that_raises_on_all_ranks_ends_its_request_alone(networks):
    _, folder = networks("qwen3")
    ranks = RankThreads(folder, torch.float32, 2)
    try:
        session = ranks.session()
        core = Recorded(ranks.model, torch.float32, ranks=session)
        good, bad = (ModelInputs((1, 2, 3), np.arange(3)[None], 3) for _ in range(2))
        (sequence,) = core.add("bad", bad, GREEDY)
        core.add("good", good, GREEDY)
        inputs = session.memory.inputs
        write = core.core.runner.writer.write

        def spoiled(step, **options):
            write(step, **options)
            for row, chunk in enumerate(step.chunks):  # an id that no rank has
                if chunk.sequence is sequence:
                    inputs.arrays["token_ids"][inputs.arrays["query_starts"][row]] = 10**6

        core.core.runner.writer.write = spoiled
        failures = {}
        while core.core.has_work:
            failures.update(core.core.step().failures)
        assert list(failures) == ["bad"] and "1000000" in str(failures["bad"])
    finally:
        ranks.close()
