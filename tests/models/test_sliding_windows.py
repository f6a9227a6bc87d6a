"""Layers with a sliding window between layers that see all: transformers' answers, and pages for the window alone."""

import copy

import pytest
import tiny
import tiny_checkpoint
import torch
import transformers
from core_answers import CoreAnswers
from test_odd_checkpoints import change_config

from tilewright import Engine
from tilewright.engine.kv.pages import PagePool
from tilewright.engine.kv.prefix_cache import pages_in_window
from tilewright.types import ModelInputs, SamplingParams

FAMILY = "qwen3_window"
WINDOW, PAGE_SIZE, NUM_TOKENS = 40, 32, 72
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
IN_WINDOW = pages_in_window(WINDOW, PAGE_SIZE)


@pytest.fixture(scope="module")
def prompts():
    """Two of several windows with the same beginning, and between them one that is shorter than a window."""
    long = tiny.text_prompt(230, 1).inputs
    other = (*long.token_ids[:150], *tiny.text_prompt(70, 2).inputs.token_ids)
    return [long, tiny.text_prompt(21, 3).inputs, ModelInputs(other, long.positions[:, : len(other)], len(other))]


@pytest.fixture(scope="module")
def theirs(networks, prompts):
    """What transformers generates of each prompt by itself."""
    hf, _ = networks(FAMILY)
    return [generated(hf, inputs) for inputs in prompts]


def generated(network, inputs):
    ids = torch.tensor([inputs.token_ids])
    tokens = network.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
    return tokens[0, ids.shape[1] :].tolist()


def answers(models, **options):
    return CoreAnswers(models(FAMILY, torch.float32), torch.float32, page_size=PAGE_SIZE, **options)


def windows_of(core):
    (cache,) = core.scheduler.resources.windows.values()
    return cache


WAYS = {
    "together": {},
    "in chunks": {"tokens_per_step": 48},
    "with drafts": {"drafts": 3},
    "few pages": {"num_pages": 11},
    "few pages of windows": {"num_window_pages": 4},
    "no more pages than one window needs": {"num_window_pages": IN_WINDOW},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_answers_are_those_of_transformers(options, models, prompts, theirs, each_backend):
    core = answers(models, replay=each_backend == "native", **options)
    assert core.to(prompts, GREEDY) == theirs
    if options in (WAYS["few pages"], WAYS["few pages of windows"]):
        assert core.scheduler.num_preemptions > 0


def test_the_window_matters(networks, prompts, theirs):
    """The test above could not fail if answers did not depend on the window."""
    hf, _ = networks(FAMILY)
    config = copy.deepcopy(hf.config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    whole = tiny.network_of(config)
    whole.load_state_dict(hf.state_dict())
    assert generated(whole, prompts[0]) != theirs[0]


def test_a_prefix_is_found_by_its_last_window(models, prompts, theirs):
    core = answers(models, prefix_cache=True)
    prefix_cache, pool = core.scheduler.resources.kv.prefix_cache, windows_of(core).pool
    (sequence,) = core.add("first", prompts[0], GREEDY)
    core.run()
    end = (len(prompts[0].token_ids) - 1) // PAGE_SIZE
    first_seen = (end * PAGE_SIZE - WINDOW + 1) // PAGE_SIZE
    for digest in sequence.page_digests[:first_seen]:  # as if others had needed these pages
        pool.forget(digest)
    assert core.to(prompts[:1], GREEDY) == theirs[:1]
    assert prefix_cache.num_tokens_hit == end * PAGE_SIZE
    for digest in sequence.page_digests[:end]:
        pool.forget(digest)
    assert core.to(prompts[:2], GREEDY) == theirs[:2]  # pages of the other layers alone are of no use
    assert prefix_cache.num_tokens_hit == end * PAGE_SIZE


@pytest.mark.parametrize("options", [{}, {"prefix_cache": True}, {"replay": False, "drafts": 2}], ids=str)
def test_pages_of_a_window_do_not_grow_with_the_context(options, models):
    chunk_size = 32
    core = answers(models, tokens_per_step=chunk_size, **options)
    pool, whole, run = windows_of(core).pool, core.scheduler.resources.kv.pool, core.core.runner.run
    held = []

    def watched(step):
        held.append((step.chunks[0].num_tokens, pool.num_used, whole.num_used))
        return run(step)

    core.core.runner.run = watched
    core.to([tiny.text_prompt(350, 4).inputs], GREEDY)
    assert max(used for _, used, _ in held) <= pages_in_window(WINDOW + chunk_size - 1, PAGE_SIZE) < 5
    assert max(used for count, used, _ in held if count <= 3) <= pages_in_window(WINDOW + 2, PAGE_SIZE)
    assert held[-1][2] == whole.pages_for(350 + NUM_TOKENS - 1)


@pytest.mark.parametrize("kinds", [["sliding", "full", "sliding"], ["sliding"] * 3], ids=["some", "all"])
def test_an_engine_divides_its_memory(kinds, tmp_path):
    folder = tiny_checkpoint.write_text_model(tmp_path)
    layers = {"layer_types": [f"{kind}_attention" for kind in kinds], "use_sliding_window": True, "sliding_window": 100}
    change_config(folder, lambda config: config.update(layers))
    ids = [7 + index * index % 90 for index in range(500)]
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, min_new_tokens=40)[0, 500:].tolist()
    size = 4 << 20
    options = {"max_context": 1024, "max_sequences": 16, "max_tokens_per_step": 128, "kv_memory": size}
    with Engine(folder, dtype="float32", pack_cache=False, **options) as engine:
        for _ in range(2):
            completion = engine.generate(prompt_token_ids=ids, temperature=0.0, max_tokens=40, ignore_eos=True)
            assert list(completion.token_ids) == expected
        stats = engine.stats()
    assert stats.prefix_hit_rate > 0.4 and stats.num_preemptions == 0
    assert stats.num_pages_used == stats.num_window_pages_used == 0 < stats.num_window_pages
    page_bytes = engine.kv_bytes_per_token // len(kinds) * PagePool(1).page_size
    own = kinds.count("full") * stats.num_pages + kinds.count("sliding") * stats.num_window_pages
    assert stats.kv_bytes == own * page_bytes <= size
    assert stats.kv_bytes_touched <= stats.kv_bytes
    if "full" in kinds:
        assert size - stats.kv_bytes < 2 * page_bytes
    # A context that a window covers needs no pages of its own.
    with Engine(folder, dtype="float32", pack_cache=False, **{**options, "max_context": 100}) as engine:
        assert engine.stats().num_window_pages == 0
