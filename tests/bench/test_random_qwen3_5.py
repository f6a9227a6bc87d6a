"""Random checkpoints of Qwen3.5 and what measures their shapes: whole for transformers as for us."""

import json
import sys

import pytest
import torch
import transformers
from sources import ROOT

from tilewright import Engine
from tilewright.bench.timing import Probe

FIRST_SPECIAL = 300
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VISION = {"hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import random_checkpoint
    import random_qwen3_5
    import shapes

    released = random_qwen3_5.config_of

    def smaller(size, num_layers):
        """As released, but for the widths; special tokens follow a few hundred others."""
        config = released(size, num_layers)
        for kind in ("image", "video", "vision_start", "vision_end"):
            config[f"{kind}_token_id"] += FIRST_SPECIAL - 248_044
        config["text_config"] |= TEXT
        config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
        config["vision_config"] |= VISION
        return config

    monkeypatch.setattr(random_qwen3_5, "FIRST_SPECIAL", FIRST_SPECIAL)
    monkeypatch.setattr(random_qwen3_5, "config_of", smaller)
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 100_000)  # several
    return random_qwen3_5, shapes


def write(monkeypatch, script, folder, *options):
    monkeypatch.setattr(sys, "argv", ["random_qwen3_5.py", "35B-A3B", str(folder), "--layers", "4", *options])
    script.main()
    return folder


def test_transformers_finds_every_tensor(monkeypatch, capsys, scripts, tmp_path):
    folder = write(monkeypatch, scripts[0], tmp_path)
    assert "parameters" in capsys.readouterr().out
    network, found = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    weights = network.state_dict()
    assert all(value.float().isfinite().all() for value in weights.values())
    name = "model.language_model.layers.0.linear_attn"
    assert weights[f"{name}.A_log"].exp().max() < 16 and (weights[f"{name}.norm.weight"] == 1).all()
    rows = [weights[f"{name}.{part}.weight"].float() for part in ("in_proj_qkv", "out_proj")]
    assert not torch.equal(rows[0][:16, :16], rows[1][:16, :16]) and 0.015 < float(rows[0].std()) < 0.025


@pytest.mark.parametrize("options", [[], ["--no-mtp"]])
def test_it_answers(monkeypatch, scripts, tmp_path, options):
    folder = write(monkeypatch, scripts[0], tmp_path, *options)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert any(name.startswith("mtp.") for name in index["weight_map"]) == (not options)
    with Engine(folder, kv_memory="20MB", max_context=256, pack_cache=False) as engine:
        assert engine.chat([{"role": "user", "content": "hello"}], max_tokens=3, ignore_eos=True).token_ids


def test_shapes_are_measured(monkeypatch, scripts):
    script, shapes = scripts
    monkeypatch.setattr(shapes, "probe", lambda: Probe(20.0, 18.0, 1.0, 2.0, "float32"))
    image = shapes.image
    monkeypatch.setattr(shapes, "image", lambda vision, side: image(vision, side // 8))
    figures = shapes.measure(shapes.make_model(script.config_of("35B-A3B", 4)), [1, 3], 1)
    for name in ("decode 1: share of best pass", "decode 3: tokens/s", "prefill 1024: share of torch's product"):
        assert figures[name]["median"] > 0
    assert figures["image 1024x1024: first token s"]["median"] > 0
