"""Rope scaling of every kind against transformers: frequencies, and the context that it stretches to."""

import logging

import pytest
import tiny
import torch
import transformers
from test_mllama import load_folder
from test_odd_checkpoints import change_config
from test_parity import expected, logits_of, relative
from tiny_checkpoint import write_text_model

from tilewright.engine.engine import Engine
from tilewright.layers.rope import RopeConfig
from tilewright.types import UnsupportedConfig

MAX_POSITIONS, HEAD_WIDTH = 256, 24
PROMPT = tiny.text_prompt(75, 1)
BASE = {"rope_theta": 1e4, "factor": 4.0}
YARN = {**BASE, "rope_type": "yarn", "original_max_position_embeddings": 64}
DYNAMIC = {**BASE, "rope_type": "dynamic"}
LONG = {
    "rope_theta": 1e4,
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_WIDTH // 2)],
    "long_factor": [2.0 + 0.5 * i for i in range(HEAD_WIDTH // 2)],
}


@pytest.fixture
def make_pair(tmp_path):
    """transformers' Llama with these rope parameters, and ours of the same checkpoint."""

    def make(parameters, **config):
        text = {**tiny.TEXT, "max_position_embeddings": MAX_POSITIONS, **config}
        hf = tiny.network_of(transformers.LlamaConfig(**text, rope_parameters=dict(parameters)))
        return hf, load_folder(tiny.save(hf, tmp_path))

    return make


@pytest.mark.parametrize(
    "parameters",
    [
        {**BASE, "rope_type": "linear"},
        DYNAMIC,
        YARN,
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 0.707},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.0},
        {**YARN, "attention_factor": 1.3, "mscale": 0.707, "mscale_all_dim": 0.5},
        {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        LONG,  # 75 tokens are longer than 64
        {**LONG, "factor": 2.0},
        {**LONG, "attention_factor": 1.2},
        {**LONG, "original_max_position_embeddings": 256},  # not longer
    ],
)
def test_logits_are_those_of_transformers(make_pair, make_runner, parameters):
    hf, model = make_pair(parameters)
    (ours,) = logits_of(make_runner(model), [PROMPT])
    assert relative(ours, expected(hf, PROMPT)) < 1e-4


@pytest.mark.parametrize("length", [300, 400])
def test_dynamic_beyond_its_positions_is_transformers_at_that_length(make_pair, make_runner, length):
    """transformers takes the base of the sequence's own length; ours is of the longest that may come, for all."""
    hf, model = make_pair(DYNAMIC)
    model.decoder.ropes.fit(length)
    prompt = tiny.text_prompt(length, 1)
    (ours,) = logits_of(make_runner(model), [prompt])
    assert relative(ours, expected(hf, prompt)) < 1e-4


def test_longrope_is_short_where_the_context_is(make_pair, make_runner):
    hf, model = make_pair(LONG)
    model.decoder.ropes.fit(64)
    prompt = tiny.text_prompt(50, 1)
    (ours,) = logits_of(make_runner(model), [prompt])
    assert relative(ours, expected(hf, prompt)) < 1e-4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"long_factor": [1.0]}, "long_factor with 1 entries, expected 12 numbers"),
        ({"long_factor": None}, "long_factor with None, expected 12 numbers"),
        ({"long_factor": ["1"] * 12}, "long_factor is '1', expected a number"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings 0.0, expected more than 0"),
        ({"rope_type": "yarn", "factor": -1}, "factor -1.0, expected more than 0"),
        ({"rope_type": "spiral"}, "rope type is 'spiral', expected default, linear, dynamic, llama3, yarn or longrope"),
    ],
)
def test_parameters_that_cannot_be(networks, tmp_path, changes, message):
    tiny.save(networks("llama")[0], tmp_path)
    change_config(tmp_path, lambda config: config.update(rope_parameters={**LONG, **changes}))
    with pytest.raises(UnsupportedConfig, match=message):
        load_folder(tmp_path)


def test_parameters_nested_by_layer_type(make_pair, make_runner, tmp_path):
    hf, _ = make_pair(YARN)
    full, other = {"full_attention": YARN}, {"sliding_attention": {"rope_theta": 77.0, "rope_type": "default"}}
    for nested, layer_types in (
        (full, None),
        ({**full, "sliding_attention": dict(YARN)}, None),
        ({**full, **other}, ["full_attention"] * 3),  # no layer is of the other type
    ):
        change_config(tmp_path, lambda config, t=nested, k=layer_types: config.update(rope_parameters=t, layer_types=k))
        (ours,) = logits_of(make_runner(load_folder(tmp_path)), [PROMPT])
        assert relative(ours, expected(hf, PROMPT)) < 1e-4
    change_config(tmp_path, lambda config: config.update(rope_parameters={**full, **other}, layer_types=None))
    with pytest.raises(UnsupportedConfig, match="rope_parameters has tables for full_attention, sliding_attention"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "parameters, expected_context",
    [
        ({"rope_type": "default"}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 131072),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 65536),
        ({"rope_type": "dynamic", "factor": 2.0}, 65536),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 4096}, 32768),
    ],
)
def test_the_context_that_scaling_stretches_to(parameters, expected_context):
    config = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": parameters}
    assert RopeConfig.from_dict(config, 128).longest_context == expected_context


def test_an_engine_with_a_stretched_context(tmp_path, caplog):
    """Of the context that scaling gives, all can be asked for; of more, what is used is told."""
    folder = write_text_model(tmp_path)
    positions = tiny.config_of(folder)["max_position_embeddings"]
    theta = 1e4
    change_config(folder, lambda config: config.update(rope_parameters={**DYNAMIC, "rope_theta": theta}))
    options = {"kv_memory": "64MB", "pack_cache": False, "max_sequences": 2}
    with caplog.at_level(logging.WARNING):
        with Engine(folder, max_context=3 * positions, **options) as engine:
            assert engine.limits.max_context == 3 * positions
            (rope,) = engine.loaded.model.decoder.ropes.ropes
            width = rope.config.width
            base = theta * (4 * 3 - 3) ** (width / (width - 2))
            assert rope.inv_freq[-1] == pytest.approx(base ** (2 / width - 1), rel=1e-5)
        assert "max_context" not in caplog.text
        with Engine(folder, max_context=5 * positions, **options) as engine:
            assert engine.limits.max_context == 4 * positions
        assert f"max_context is {5 * positions}, and " in caplog.text
        assert f"supports {4 * positions} tokens at most" in caplog.text
    with Engine(folder, max_context=positions, **options) as engine:  # as transformers for all that fits
        (rope,) = engine.loaded.model.decoder.ropes.ropes
        assert torch.equal(rope.inv_freq, 1 / theta ** (torch.arange(0, width, 2) / width))
