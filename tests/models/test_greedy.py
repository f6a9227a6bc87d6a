"""A greedy answer depends on its own prompt alone: not on the batch, chunks, caches, preemption, drafts or replays."""

from weakref import WeakKeyDictionary

import numpy as np
import pytest
import tiny
import tiny_qwen3_5
import torch
from core_answers import CoreAnswers
from rank_threads import RankThreads

from tilewright.types import ModelInputs, SamplingParams

PAGE_SIZE = 32
CHUNK_SIZE = 64  # of prompts in recurrent layers; where chunks begin, a bf16 state rounds
NUM_TOKENS = 36  # enough for prompts that share few pages to need more of them
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "drawn": DRAWN}
# So few words that an answer says the same again and again, whatever the weights are.
FEW_WORDS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={5: 100.0, 9: 100.0})


def is_exact_however(model, dtype):
    """Whether the promise covers all: a bf16 state depends on where chunks began, and on what was decoded, not read
    (docs/models/qwen3_5.md)."""
    return model.state_spec is None or dtype == torch.float32


class Answers(CoreAnswers):
    def __init__(self, model, dtype, **options):
        page_size = PAGE_SIZE if is_exact_however(model, dtype) else CHUNK_SIZE
        ranks = RANKS.get(model)
        super().__init__(model, dtype, page_size=page_size, ranks=ranks and ranks.session(), **options)


RANKS: WeakKeyDictionary = WeakKeyDictionary()  # of the models that are split


@pytest.fixture(scope="module")
def split_models(networks):
    """By family and dtype, over two ranks."""
    made = {}

    def model(family, dtype):
        if (family, dtype) not in made:
            made[family, dtype] = RankThreads(networks(family)[1], dtype, 2)
        ranks = made[family, dtype]
        RANKS[ranks.model] = ranks
        return ranks.model

    yield model
    for ranks in made.values():
        ranks.close()


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
FAMILIES = ("qwen3_vl", "qwen3_moe", "qwen3_window", "mllama", "qwen3_5", "qwen3_next")
# Family, ranks and dtype. Split families differ in what they cache, which fp32 shows in all ways of computing; sums of
# ranks are rounded to bf16 in the same place of every family, so one is enough.
CASES = [
    *((family, 1, dtype) for family in FAMILIES for dtype in DTYPES),
    *(("qwen3_vl", 2, dtype) for dtype in DTYPES),
    ("qwen3_window", 2, "f32"),
    ("mllama", 2, "f32"),
    ("qwen3_5_moe", 2, "f32"),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}-{case[2]}")
def case(request, networks, models, split_models):
    """A model and prompts for it, of which two share a beginning and one repeats itself."""
    family, num_ranks, dtype_name = request.param
    dtype = DTYPES[dtype_name]
    hf, _ = networks(family)
    num_axes = 3 if family in (*tiny.VISION_FAMILIES, *tiny_qwen3_5.SEEING) else 1
    prompts = [tiny.text_prompt(length, seed, num_axes) for length, seed in ((5, 1), (90, 2), (33, 3))]
    repeating = np.tile(np.arange(11), 8)
    positions = np.broadcast_to(np.arange(len(repeating)), (num_axes, len(repeating))).astype(np.int64)
    inputs = [prompt.inputs for prompt in prompts] + [ModelInputs(tuple(repeating.tolist()), positions, len(repeating))]
    longer = (*prompts[1].inputs.token_ids, 1, 2, 3)
    positions = np.broadcast_to(np.arange(len(longer)), (num_axes, len(longer))).astype(np.int64)
    inputs.append(ModelInputs(longer, positions, len(longer)))
    if family in tiny.CROSS_FAMILIES:
        for pieces, seed in (
            ([4, (1, 2), 9], 4),
            ([(2, 2), 30, (1, 1), (1, 3), 5], 5),
            ([4, (1, 2), 9, (1, 2), 3], 4),
        ):
            inputs.append(tiny.in_dtype(tiny.cross_prompt(pieces, seed).inputs, dtype))
    if num_axes == 3:
        for media, seed in (
            ([("image", (1, 6, 8))], 4),
            ([("image", (1, 4, 4)), ("image", (1, 10, 6))], 5),
            ([("video", (3, 4, 6))], 6),
        ):
            inputs.append(tiny.in_dtype(tiny.media_prompt(hf, media, seed).inputs, dtype))
    return (models if num_ranks == 1 else split_models)(family, dtype), dtype, inputs


@pytest.fixture(scope="module")
def known_answers():
    return {}


@pytest.fixture
def alone(case, known_answers):
    """The answers, each computed by itself, op by op, in one piece."""
    model, dtype, prompts = case

    def of(how):
        key = id(model), how
        if key not in known_answers:
            known_answers[key] = [
                Answers(model, dtype, replay=False).to([inputs], PARAMS[how])[0] for inputs in prompts
            ]
        return known_answers[key]

    return of


def test_answers_do_not_depend_on_how_they_are_computed(case, alone):
    check_ways(case, alone, "greedy")


@pytest.mark.parametrize(
    "case", [("qwen3_vl", 1, "f32"), ("qwen3_vl", 2, "f32"), ("qwen3_5", 1, "bf16")], indirect=True
)
def test_drawn_answers_do_not_either(case, alone):
    """What is drawn depends on logits, seed and place, whatever the family."""
    check_ways(case, alone, "drawn")


def check_ways(case, alone, how):
    model, dtype, prompts = case
    assert len({tuple(answer) for answer in alone(how)}) > 1
    ways = {
        "together": Answers(model, dtype),
        "op by op": Answers(model, dtype, replay=False),
        "with drafts": Answers(model, dtype, drafts=4),
        "a picture at a time": Answers(model, dtype, encode_patches=80),
    }
    if model.cross_spec:
        ways["one group at a time"] = Answers(model, dtype, num_cross_pages=3)
    if model.state_spec:
        ways["few states"] = Answers(model, dtype, num_state_slots=5, drafts=2, prefix_cache=True)
        ways["chunks of a page"] = Answers(model, dtype, tokens_per_step=4 * CHUNK_SIZE)
    if is_exact_however(model, dtype):
        small = {"num_pages": 9, "num_cross_pages": 5, "num_state_slots": 9}
        ways |= {
            "chunks of 7": Answers(model, dtype, tokens_per_step=7),
            "chunks of 32": Answers(model, dtype, tokens_per_step=32),
            "few pages": Answers(model, dtype, num_pages=8),
            "few pages, cached": Answers(model, dtype, prefix_cache=True, drafts=3, tokens_per_step=40, **small),
        }
    for name, answers in ways.items():
        assert answers.to(prompts, PARAMS[how]) == alone(how), name
    assert "few pages" not in ways or ways["few pages"].scheduler.num_preemptions > 0


def test_right_drafts_change_nothing(case):
    model, dtype, prompts = case
    alone = [Answers(model, dtype, replay=False).to([inputs], FEW_WORDS)[0] for inputs in prompts]
    answers = Answers(model, dtype, drafts=4)
    assert answers.to(prompts, FEW_WORDS) == alone
    assert answers.scheduler.drafter.num_accepted > 0


def test_answers_do_not_depend_on_what_is_cached(case, alone):
    model, dtype, prompts = case
    answers = Answers(model, dtype, prefix_cache=True)
    for _ in range(2):
        assert answers.to(prompts, GREEDY) == alone("greedy")
    prefix = answers.scheduler.resources.kv.prefix_cache
    assert prefix.num_tokens_hit > 0
    if any(inputs.media for inputs in prompts):
        features, cross_cache = (
            answers.scheduler.resources.media.features,
            answers.scheduler.resources.media.cross_cache,
        )
        prefix.pool.clear()  # the pictures' tokens are computed again, from features or groups that are still there
        hits = features.num_hits + cross_cache.num_hits
        assert answers.to(prompts, GREEDY) == alone("greedy")
        assert features.num_hits + cross_cache.num_hits > hits
        prefix.pool.clear()
        cross_cache.clear()  # and groups from features
        num_lookups, num_hits = features.num_lookups, features.num_hits
        assert answers.to(prompts, GREEDY) == alone("greedy")
        assert features.num_lookups - num_lookups == features.num_hits - num_hits > 0
