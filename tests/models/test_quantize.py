"""Whole models whose weights are rounded while they are loaded: what is rounded, how far answers move, ranks, cache."""

import argparse
import statistics
from dataclasses import replace

import pytest
import tiny
import tiny_checkpoint
import tiny_qwen3_5
import torch
from core_answers import CoreAnswers
from rank_threads import RankThreads
from test_parity import rms

from tilewright import Engine, config
from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.flags import engine as engine_flags
from tilewright.layers import precision
from tilewright.models.registry import family_of
from tilewright.ops import backend
from tilewright.ops.packed import Packed
from tilewright.types import RequestError, SamplingParams
from tilewright.weights.spec import iter_weights

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# A table tied to the head, experts and pictures, cross-attention, and delta nets in both layouts.
CASES = [
    ("qwen3", "int8"),
    ("qwen3_vl_moe", "int4"),
    ("mllama", "int8"),
    ("qwen3_5_moe", "int4"),
    ("qwen3_next", "int8"),
    ("qwen3", "fp8"),
]
# How far logits of random networks of three layers move, beside their own size; of unrelated ones it is 1.4. Those with
# many experts choose others, and are left out.
ERRORS = {"int8": 0.1, "int4": 0.9, "fp8": 0.25}
# What a byte more or less here and there leaves between two ways to compute the same.
SAME = 0.06


def prompts_for(family, hf, seed=0):
    if family in tiny.CROSS_FAMILIES:
        found = [tiny.text_prompt(40, 1), tiny.cross_prompt([4, (1, 2), 9], 4)]
    elif family in (*tiny.VISION_FAMILIES, *tiny_qwen3_5.SEEING):
        found = [tiny.text_prompt(40, 1 + seed, num_axes=3), tiny.media_prompt(hf, [("image", (1, 6, 8))], 3 + seed)]
    else:
        found = [tiny.text_prompt(70, 1), tiny.text_prompt(33, 3)]
    return [tiny.in_dtype(prompt.inputs, torch.float32) for prompt in found]


def first_logits(networks, family, quantize, size=1, seed=0):
    """The logits of the last tokens of all prompts, computed in one step."""
    hf, folder = networks(family)
    ranks = RankThreads(folder, torch.float32, size, quantize=quantize)
    kept = []
    try:
        core = CoreAnswers(ranks.model, torch.float32, page_size=32, ranks=ranks.session(), replay=False)
        run = core.core.runner.run
        core.core.runner.run = lambda step: kept.append(logits := run(step).clone()) or logits
        core.to(prompts_for(family, hf, seed), GREEDY)
    finally:
        ranks.close()
    return kept[0]


def distance(ours, theirs):
    return rms(ours - theirs) / rms(theirs)


@pytest.mark.parametrize(("family", "quantize"), CASES)
def test_logits_are_those_of_plain_torch(family, quantize, networks):
    """Where two experts of a token are nearly equal, a byte decides which it takes: most prompts are the same."""
    distances = []
    for seed in range(7 if "moe" in family else 1):
        native = first_logits(networks, family, quantize, seed=seed)
        with backend.use("torch"):
            plain = first_logits(networks, family, quantize, seed=seed)
        distances += [distance(*logits) for logits in zip(native, plain, strict=True)]
    assert statistics.median(distances) < SAME


@pytest.mark.parametrize("quantize", ERRORS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl_moe", "mllama"])
def test_logits_move_little(family, quantize, networks):
    exact = first_logits(networks, family, None)
    assert 0 < distance(first_logits(networks, family, quantize), exact) < ERRORS[quantize]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl_moe", "qwen3_next"])
def test_groups_are_those_of_one_rank(family, networks):
    alone = first_logits(networks, family, "fp8")
    assert distance(first_logits(networks, family, "fp8", size=2), alone) < SAME


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_ranks_rotate_and_round_their_own_parts_of_rows(networks, quantize):
    exact = first_logits(networks, "qwen3", None)
    assert 0 < distance(first_logits(networks, "qwen3", quantize, size=2), exact) < ERRORS[quantize]


def formats_of(network):
    """Of each packed weight, by the name of its first source."""
    return {
        weight.sources[0].name: str(weight.value.form.format)
        for weight in iter_weights(network.model)
        if isinstance(weight.value, Packed)
    }


def test_what_steers_much_is_not_rounded(networks):
    formats = formats_of(load_network(networks("qwen3_5_moe")[1], EngineOptions(quantize="int4", pack_cache=False)))
    exact = {name for name, format in formats.items() if format == "bfloat16" or format == "float32"}
    assert exact and all(name.endswith((".mlp.gate.weight", ".in_proj_b.weight")) for name in exact), exact
    for name, format in formats.items():
        if ".layers." in name and name not in exact:
            is_sensitive = ".self_attn." in name or name.endswith("shared_expert.down_proj.weight")
            assert format == ("int8_rotated" if is_sensitive else "int4_rotated in groups of 32"), name
    assert any(".self_attn." in name for name in formats)
    assert {format for name, format in formats.items() if "lm_head" in name or "embed_tokens" in name} == {
        "int8_rotated"
    }


@pytest.mark.parametrize(("num_layers", "sensitive"), [(8, {0, 7}), (7, set())])
def test_first_and_last_layers_are_rounded_less(num_layers, sensitive, networks):
    config = tiny.config_of(networks("qwen3")[1]) | {"num_hidden_layers": num_layers, "layer_types": None}
    with precision.use(precision.named("int4")):
        model = family_of(config).build(config, {})
    formats = {i: layer.mlp.gate_up.weight.quantized_as for i, layer in enumerate(model.decoder.layers)}
    assert {i for i, format in formats.items() if format == ("int8_rotated", 0)} == sensitive
    assert {format for i, format in formats.items() if i not in sensitive} == {("int4_rotated", 32)}


@pytest.mark.parametrize(("width", "format"), [(960, ("int8_rotated", 0)), (1024, ("int4_rotated", 32))])
def test_narrow_models_round_their_down_projections_less(width, format, networks):
    config = tiny.config_of(networks("qwen3")[1]) | {"hidden_size": width}
    with precision.use(precision.named("int4")):
        model = family_of(config).build(config, {})
    assert {layer.mlp.down.weight.quantized_as for layer in model.decoder.layers} == {format}
    assert {layer.mlp.gate_up.weight.quantized_as for layer in model.decoder.layers} == {("int4_rotated", 32)}


def test_the_report_counts_bytes_by_format(networks):
    folder = networks("qwen3")[1]
    sizes = {
        quantize: load_network(
            folder, EngineOptions(dtype="bfloat16", quantize=quantize, pack_cache=False)
        ).report.bytes_by_format
        for quantize in (None, "int8", "int4")
    }
    assert list(sizes[None]) == ["bfloat16"]
    assert set(sizes["int8"]) == {"int8_rotated", "bfloat16"}
    assert set(sizes["int4"]) == {"int4_rotated in groups of 32", "int8_rotated", "bfloat16"}
    assert sum(sizes["int4"].values()) < sum(sizes["int8"].values()) < 0.7 * sum(sizes[None].values())


def test_an_answer_does_not_depend_on_those_beside_it(networks):
    hf, folder = networks("qwen3_vl_moe")
    model = load_network(folder, EngineOptions(dtype="bfloat16", quantize="int4", pack_cache=False)).model
    prompts = [tiny.in_dtype(prompt, torch.bfloat16) for prompt in prompts_for("qwen3_vl_moe", hf)]

    def answers(some, **options):
        return CoreAnswers(model, torch.bfloat16, page_size=32, **options).to(some, GREEDY)

    together = answers(prompts)
    assert together == [answers([prompt])[0] for prompt in prompts] == answers(prompts, tokens_per_step=17)
    assert together == answers(prompts, replay=False)


def test_an_engine_keeps_rounded_weights(tmp_path, monkeypatch):
    folder = tiny_checkpoint.write_text_model(tmp_path / "model")
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    options = {"dtype": "bfloat16", "kv_memory": "8MB", "max_context": 128, "max_sequences": 1}
    said, paths = [], []
    for quantize in ("int8", "int4", None) * 2:
        with Engine(folder, quantize=quantize, **options) as engine:
            paths.append(engine.loaded.report.cache_path)
            assert engine.loaded.report.from_cache == (len(said) >= 3)
            said.append(engine.generate("abc", max_tokens=6, temperature=0.0).token_ids)
    assert said[:3] == said[3:] and paths[:3] == paths[3:] and len(set(paths)) == 3


def test_a_format_that_there_is_not(tmp_path):
    folder = tiny_checkpoint.write_text_model(tmp_path / "model")
    with pytest.raises(RequestError, match="quantize is 'int3', expected int8, int4, fp8, none or auto"):
        Engine(folder, quantize="int3")


def test_the_flag():
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    assert engine_flags.engine_options(parser.parse_args(["--quantize", "int4"]))["quantize"] == "int4"
    assert "quantize" not in engine_flags.engine_options(parser.parse_args([]))
