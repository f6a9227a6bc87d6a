"""Random checkpoints of Llama-3.2-Vision and what measures them: whole for transformers as for us, biases and all."""

import json
import sys

import pytest
import tiny
import transformers
from sources import ROOT

from tilewright import Engine

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def config():
    config = tiny.CONFIGS["mllama"].to_dict()
    config["image_token_index"] = config["text_config"]["vocab_size"] = 300
    return json.loads(json.dumps(config))


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import random_mllama
    import shapes

    return random_mllama, shapes


def write(monkeypatch, capsys, script, folder, config):
    import random_checkpoint

    path = folder / "sizes.json"
    path.write_text(json.dumps(config))
    arguments = ["random_mllama.py", str(folder / "made"), "--config", str(path), "--threads", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 100_000)  # several
    script.main()
    assert "parameters in" in capsys.readouterr().out
    return folder / "made"


def test_transformers_finds_every_tensor(monkeypatch, capsys, scripts, tmp_path, config):
    folder = write(monkeypatch, capsys, scripts[0], tmp_path, config)
    network, found = transformers.MllamaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    weights = network.state_dict()
    assert all(value.float().isfinite().all() for value in weights.values())
    assert {float(value) for name, value in weights.items() if name.endswith(("_gate", "gate_attn", ".gate"))} == {0.5}
    layers = [weights[f"model.language_model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not layers[0].equal(layers[1]) and 0.015 < float(layers[0].float().std()) < 0.025


def test_the_engine_answers(monkeypatch, capsys, scripts, tmp_path, config):
    folder = write(monkeypatch, capsys, scripts[0], tmp_path, config)
    with Engine(folder, dtype="float32", kv_memory="20MB", max_context=256, pack_cache=False) as engine:
        assert engine.chat([{"role": "user", "content": "hello"}], max_tokens=3).token_ids


def test_shapes_have_the_biases_of_real_checkpoints(scripts, config):
    tower = scripts[1].make_model(config).vision
    layers = [*tower.local_layers, *tower.global_layers]
    assert all(layer.mlp_in.packed.bias is not None and layer.mlp_out.packed.bias is not None for layer in layers)
    assert tower.projector.packed.bias is not None and layers[0].qkv.packed.bias is None
