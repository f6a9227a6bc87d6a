"""GGUF files of several parts, experts in one tensor, and blocks of codes: written by the format's own library."""

import re

import gguf
import numpy as np
import pytest
import torch
from core_answers import CoreAnswers
from gguf import GGMLQuantizationType as Type
from gguf import quants
from test_gguf import HEAD_WIDTH, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, model_tensors, random, write

from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.ops.quantized import dequantize
from tilewright.types import ModelInputs, SamplingParams
from tilewright.weights.checkpoint import CheckpointError, open_checkpoint
from tilewright.weights.dequantize import FORMATS
from tilewright.weights.dequantize import dequantize as decoded
from tilewright.weights.gguf.quants import SPLITS

EXPERTS, CHOSEN, INNER = 6, 2, 64


@pytest.mark.parametrize("kind", [Type.IQ4_NL, Type.MXFP4], ids=lambda kind: kind.name)
def test_blocks_of_codes(kind):
    """Any bytes are blocks of them, once their scales are small."""
    format = next(format for format in FORMATS.values() if format.name == kind.name)
    data = np.random.default_rng(1).integers(0, 256, (12, format.block_bytes), dtype=np.uint8)
    if kind == Type.IQ4_NL:
        data[:, :2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    else:
        data[:, 0] = np.arange(12) + 115  # 2^-12 to 2^-1
    expected = torch.from_numpy(quants.dequantize(data, kind)).view(3, 128)
    stored = torch.from_numpy(data).flatten()
    assert torch.equal(decoded(stored, format, 128), expected)
    taken = SPLITS[kind.name].rows(stored, 3)
    assert torch.equal(dequantize(taken), expected)


@pytest.mark.parametrize("kind", [Type.IQ4_NL, Type.MXFP4], ids=lambda kind: kind.name)
def test_models_of_codes_answer_as_what_they_stand_for(tmp_path, kind, monkeypatch):
    # The library writes no IQ4_NL: any codes, with a scale that suits weights of this size.
    def blocks(tensor, stored_kind):
        if stored_kind != kind or kind == Type.MXFP4:
            return original(tensor, stored_kind)
        data = np.random.default_rng(2).integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // 32, 18), np.uint8)
        data[..., :2] = np.array([0.015], dtype=np.float16).view(np.uint8)
        return data.reshape(*tensor.shape[:-1], -1)

    original = quants.quantize
    monkeypatch.setattr(quants, "quantize", blocks)
    path = tmp_path / "m.gguf"
    write(path, "qwen3", model_tensors("qwen3"), kind)
    logits = {}
    for quantize in (None, "none"):
        loaded = load_network(path, EngineOptions(dtype="float32", quantize=quantize, pack_cache=False))
        logits[quantize] = logits_of(loaded)
        assert (f"{kind.name.lower()} in groups of 32" in loaded.report.bytes_by_format) == (quantize is None)
    error = (logits[None] - logits["none"]).square().mean() / logits["none"].square().mean()
    assert 0 < error.sqrt() < 0.1


def logits_of(loaded):
    core = CoreAnswers(loaded.model, torch.float32, page_size=32, replay=False)
    kept, run = [], core.core.runner.run
    core.core.runner.run = lambda step: kept.append(found := run(step).clone()) or found
    inputs = ModelInputs(tuple(range(3, 40)), np.arange(37)[None], 37)
    core.to([inputs], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return kept[0]


def write_experts(path, kind=Type.F32, **options) -> dict[str, torch.Tensor]:
    """A qwen3moe of one layer; what a reader must find under Hugging Face's names."""
    layer = "model.layers.0.mlp."
    tensors = {name: tensor for name, tensor in model_tensors("qwen3").items() if ".mlp." not in name}
    merged = {
        "blk.0.ffn_gate_inp.weight": random(EXPERTS, HIDDEN),
        "blk.0.ffn_gate_exps.weight": random(EXPERTS, INNER, HIDDEN) * 0.1,
        "blk.0.ffn_up_exps.weight": random(EXPERTS, INNER, HIDDEN) * 0.1 + 0.01,
        "blk.0.ffn_down_exps.weight": random(EXPERTS, HIDDEN, INNER) * 0.1,
    }
    writer = gguf.GGUFWriter(path, "qwen3moe", **options)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 1)
    expected = {}
    for name, tensor in tensors.items():
        expected[name] = torch.from_numpy(tensor)
        writer.add_tensor(table.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
    for name, tensor in merged.items():
        own = kind if tensor.ndim == 3 else Type.F32
        data = quants.quantize(tensor, own)
        values = torch.from_numpy(quants.dequantize(data, own).reshape(tensor.shape).copy())
        writer.add_tensor(name, data, raw_dtype=own)
        if tensor.ndim == 2:
            expected[f"{layer}gate.weight"] = values
            continue
        part = re.search(r"ffn_(\w+)_exps", name)[1]
        expected |= {f"{layer}experts.{e}.{part}_proj.weight": value for e, value in enumerate(values)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_experts_are_tensors_of_their_own(tmp_path, kind):
    path = tmp_path / "m.gguf"
    expected = write_experts(path, kind)
    checkpoint = open_checkpoint(path)
    assert checkpoint.shapes == {name: tuple(values.shape) for name, values in expected.items()}
    for name, values in expected.items():
        assert torch.equal(checkpoint.read(name).float(), values), name
    config = checkpoint.config
    assert (config["model_type"], config["num_experts"], config["num_experts_per_tok"]) == (
        "qwen3_moe",
        EXPERTS,
        CHOSEN,
    )
    assert config["moe_intermediate_size"] == INNER and config["norm_topk_prob"] is True
    loaded = load_network(path, EngineOptions(dtype="float32", pack_cache=False))
    if kind != Type.F32:
        experts = {"Q4_0": "int4 in groups of 32", "Q8_0": "int8 in groups of 32"}[kind.name]
        assert loaded.report.bytes_by_format[experts] > 3 * EXPERTS * INNER * HIDDEN / 2
        widened = load_network(path, EngineOptions(dtype="float32", quantize="none", pack_cache=False))
        ours, plain = logits_of(loaded), logits_of(widened)
        assert 0 < (ours - plain).square().mean().sqrt() / plain.square().mean().sqrt() < 0.1


def test_parts_are_read_as_one(tmp_path):
    expected = write_experts(tmp_path / "m.gguf", split_max_tensors=4)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 4 and parts[0].name == "m-00001-of-00004.gguf"
    write_experts(tmp_path / "whole.gguf")
    whole = logits_of(load_network(tmp_path / "whole.gguf", EngineOptions(dtype="float32", pack_cache=False)))
    fingerprints = set()
    for part in (parts[0], parts[2]):
        checkpoint = open_checkpoint(part)
        assert checkpoint.shapes == {name: tuple(values.shape) for name, values in expected.items()}
        assert all(torch.equal(checkpoint.read(name).float(), values) for name, values in expected.items())
        fingerprints.add(checkpoint.fingerprint)
    assert len(fingerprints) == 1
    assert torch.equal(logits_of(load_network(parts[0], EngineOptions(dtype="float32", pack_cache=False))), whole)
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match="one of 4 parts, and m-00002-of-00004"):
        open_checkpoint(parts[0])
    parts[3].rename(parts[1])
    (tmp_path / "elsewhere.gguf").rename(parts[3])
    with pytest.raises(CheckpointError, match="is not marked as part 2 of 4"):
        open_checkpoint(parts[0])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match="is one of 4 parts, but is not named so"):
        open_checkpoint(tmp_path / "first.gguf")
