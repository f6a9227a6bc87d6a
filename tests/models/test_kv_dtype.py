"""Whole models with keys and values in 8 bits: how far logits move, ranks, prefixes, states, memory."""

import pytest
import tiny_checkpoint
import torch
from core_answers import CoreAnswers
from rank_threads import RankThreads
from test_quantize import GREEDY, SAME, distance, prompts_for

from tilewright import Engine
from tilewright.engine.kv.pages import kv_byte_dtype
from tilewright.engine.load.loading import load_network
from tilewright.engine.measure.costs import costs_of
from tilewright.engine.options import EngineOptions
from tilewright.ops import backend
from tilewright.types import RequestError

# How far logits move, beside their own size, in random networks of a few layers.
ERRORS = {"int8": 0.03, "fp8": 0.2}
# Text alone; pictures; cross-attention, whose encoder states are in pages too; delta nets, whose states are not.
FAMILIES = ["qwen3", "qwen3_vl", "mllama", "qwen3_5"]


def first_logits(networks, family, kv_cache_dtype, size=1):
    hf, folder = networks(family)
    ranks = RankThreads(folder, torch.float32, size)
    kept = []
    try:
        core = CoreAnswers(
            ranks.model,
            torch.float32,
            page_size=32,
            tokens_per_step=32,  # the later chunks of a prompt read what the earlier ones stored
            ranks=ranks.session(),
            replay=False,
            kv_cache_dtype=kv_cache_dtype,
        )
        run = core.core.runner.run
        core.core.runner.run = lambda step: kept.append(logits := run(step).clone()) or logits
        core.to(prompts_for(family, hf)[:1], GREEDY)
    finally:
        ranks.close()
    return torch.cat([rows for rows in kept if len(rows)])[:1]


@pytest.mark.parametrize("kv_cache_dtype", ERRORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_move_little(family, kv_cache_dtype, networks):
    exact = first_logits(networks, family, "auto")
    assert 0 < distance(first_logits(networks, family, kv_cache_dtype), exact) < ERRORS[kv_cache_dtype]


@pytest.mark.parametrize("kv_cache_dtype", ERRORS)
def test_ranks_and_plain_torch_give_the_same(kv_cache_dtype, networks):
    native = first_logits(networks, "qwen3", kv_cache_dtype)
    assert distance(first_logits(networks, "qwen3", kv_cache_dtype, size=2), native) < SAME
    with backend.use("torch"):
        plain = first_logits(networks, "qwen3", kv_cache_dtype)
    assert distance(plain, native) < SAME


@pytest.mark.parametrize("kv_cache_dtype", ERRORS)
def test_an_answer_depends_on_nothing_but_its_prompt(kv_cache_dtype, networks):
    """Not on those beside it, on chunks, replay or drafts, nor on whether its prefix was stored by another."""
    hf, folder = networks("qwen3")
    model = load_network(folder, EngineOptions(dtype="bfloat16", pack_cache=False)).model
    prompts = prompts_for("qwen3", hf)

    def answers(some, **options):
        core = CoreAnswers(model, torch.bfloat16, page_size=32, kv_cache_dtype=kv_cache_dtype, **options)
        return [core.to([prompt], GREEDY)[0] for prompt in some] if "prefix_cache" in options else core.to(some, GREEDY)

    together = answers(prompts)
    assert together == [answers([prompt])[0] for prompt in prompts] == answers(prompts, tokens_per_step=17)
    assert together == answers(prompts, replay=False) == answers(prompts, drafts=3)
    assert [*together, *together] == answers([*prompts, *prompts], prefix_cache=True)


def test_memory_holds_nearly_twice_as_many_tokens(tmp_path):
    folder = tiny_checkpoint.write_text_model(tmp_path)
    options = {"dtype": "bfloat16", "kv_memory": "1MB", "max_context": 8192, "pack_cache": False}
    pages, sizes = {}, {}
    for name in ("auto", "int8"):
        with Engine(folder, kv_cache_dtype=name, **options) as engine:
            memory = engine.memory()
            pages[name], sizes[name] = engine.stats().num_pages, engine.kv_bytes_per_token
            assert memory.kv_bytes <= 1 << 20 and memory.kv_bytes_used == 0
            caches = engine.loop.core.runner.model_runner.kv_caches
            assert sum(cache.data.nbytes for cache in caches) == memory.kv_bytes
            assert engine.costs().kv_bytes_per_token == sizes[name]
            engine.generate("abc", max_tokens=2)
            assert engine.stats().scratch_bytes == engine.memory().scratch_bytes > 0
            assert engine.stats().resident_bytes > engine.stats().weight_bytes > 0
    assert sizes["int8"] / sizes["auto"] == (64 + 8) / 128  # heads of 32: scales take an eighth
    assert 1.7 < pages["int8"] / pages["auto"] < 1.85


def test_costs_count_bytes_as_they_are_kept(networks):
    model = load_network(networks("qwen3_5")[1], EngineOptions(dtype="bfloat16", pack_cache=False)).model
    in_bytes, plain = costs_of(model, 2, torch.int8), costs_of(model, 2)
    assert in_bytes.kv_bytes_per_token < 0.7 * plain.kv_bytes_per_token
    assert in_bytes.state_bytes_per_sequence == plain.state_bytes_per_sequence  # states keep their type


def test_a_type_that_there_is_not():
    with pytest.raises(RequestError, match="kv_cache_dtype is 'int4', expected auto, int8, fp8"):
        kv_byte_dtype("int4")
