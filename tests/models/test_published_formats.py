"""Quantised checkpoints as people publish them: their weights to the bit, and the answers of the model they mean."""

import functools
import json
from dataclasses import replace

import pytest
import tiny
import tiny_qwen3_5
import torch
import transformers
from core_answers import CoreAnswers
from published import Awq, CompressedInt8, CompressedMxfp4, CompressedPacked, Fp8, Gptq, write
from rank_threads import RankThreads
from safetensors.torch import load_file, save_file
from test_parity import rms

from tilewright import config
from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.host.files import CheckpointError
from tilewright.ops import backend
from tilewright.types import SamplingParams
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.linear import LinearWeight
from tilewright.weights.spec import iter_weights

SIZES = {**tiny.TEXT, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
# The writer, the format its linears are packed in, and how far logits may be from those of the model they mean: what
# rounding activations to bytes moves, or nothing but the order of sums where they are not rounded.
ROUNDED, EXACT = 0.1, 1e-4
CASES = {
    "compressed int8": (lambda: CompressedInt8(True), "int8", ROUNDED),
    "compressed int8, one scale": (lambda: CompressedInt8(True, "tensor"), "int8", ROUNDED),
    "compressed int8, weights alone": (lambda: CompressedInt8(False), "int8_exact", EXACT),
    "compressed int4": (lambda: CompressedPacked(32), "int4 in groups of 32", ROUNDED),
    "compressed int4 by row": (lambda: CompressedPacked(-1), "int4 in groups of 128", ROUNDED),
    "compressed int4 with zeros": (lambda: CompressedPacked(64, zeros=True), "uint4_zero in groups of 64", ROUNDED),
    "compressed int4, act order": (lambda: CompressedPacked(32, g_idx=True), "int4 in groups of 32", ROUNDED),
    "compressed int8 packed": (lambda: CompressedPacked(128, bits=8), "int8_exact in groups of 128", EXACT),
    "compressed mxfp4": (CompressedMxfp4, "mxfp4 in groups of 32", ROUNDED),
    "compressed fp8 by row": (lambda: Fp8(None, True), "fp8", EXACT),
    "compressed fp8 in blocks": (lambda: Fp8(128, True), "fp8 in groups of 128", EXACT),
    "fp8 in blocks": (lambda: Fp8(128), "fp8 in groups of 128", EXACT),
    "fp8 by tensor": (lambda: Fp8(None), "fp8", EXACT),
    "gptq": (lambda: Gptq(128), "int4 in groups of 128", ROUNDED),
    "gptq with zeros": (lambda: Gptq(32, sym=False), "uint4_zero in groups of 32", ROUNDED),
    "gptq v2 with zeros": (lambda: Gptq(32, sym=False, version=2), "uint4_zero in groups of 32", ROUNDED),
    "gptq, act order": (lambda: Gptq(32, act_order=True), "int4 in groups of 32", ROUNDED),
    "gptq, act order and zeros": (lambda: Gptq(64, sym=False, act_order=True), "uint4_zero in groups of 64", ROUNDED),
    "gptq 8 bits": (lambda: Gptq(64, bits=8), "int8 in groups of 64", ROUNDED),
    "awq": (lambda: Awq(64), "uint4_zero in groups of 64", ROUNDED),
}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(3)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)).float()


@pytest.fixture(scope="module")
def folders(network, tmp_path_factory):
    """The two folders of a case, made when first asked for."""
    return functools.cache(lambda case: write(tmp_path_factory.mktemp("published"), network, CASES[case][0]()))


def logits(folder, size=1, **options):
    """Those of the last tokens of two prompts."""
    ranks = RankThreads(folder, torch.float32, size, **options)
    kept = []
    try:
        core = CoreAnswers(ranks.model, torch.float32, page_size=32, ranks=ranks.session(), replay=size == 1)
        run = core.core.runner.run
        core.core.runner.run = lambda step: kept.append(found := run(step).clone()) or found
        num_axes = 3 if hasattr(ranks.model, "visual") else 1
        prompts = [tiny.text_prompt(length, 1, num_axes=num_axes).inputs for length in (40, 3)]
        prompts = [tiny.in_dtype(prompt, torch.float32) for prompt in prompts]
        core.to(prompts, GREEDY)
    finally:
        ranks.close()
    return kept[0]


def distance(ours, theirs):
    return rms(ours - theirs) / rms(theirs)


def linears(loaded):
    """The weights of the layers' products, by the names of their parts."""
    return {
        tuple(source.name for source in weight.sources[: weight.num_parts]): weight.value
        for weight in iter_weights(loaded.model)
        if isinstance(weight, LinearWeight) and ".layers." in weight.sources[0].name
    }


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_checkpoint(case, folders):
    stored, plain = folders(case)
    loaded, meant = load_network(stored, EngineOptions(pack_cache=False)), open_checkpoint(plain)
    found = linears(loaded)
    assert len(found) == 8  # of two layers: qkv, o, gate and up, down
    for names, packed in found.items():
        assert str(packed.form.format) == CASES[case][1]
        expected = torch.cat([meant.read(name) for name in names])
        # Products of a number and a scale are rounded to fp32, ours and the reference's each once.
        torch.testing.assert_close(packed.unpack().float(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_model_that_is_meant(case, folders):
    stored, plain = folders(case)
    assert distance(logits(stored), logits(plain)) < CASES[case][2]


@pytest.mark.parametrize("case", ["gptq, act order", "fp8 in blocks", "awq"])
def test_plain_torch_computes_the_same(case, folders):
    ours = logits(folders(case)[0])
    with backend.use("torch"):
        assert distance(logits(folders(case)[0]), ours) < 0.03


@pytest.mark.parametrize("case", ["compressed int8", "compressed int4 with zeros", "fp8 by tensor", "awq"])
def test_two_ranks(case, folders):
    stored, plain = folders(case)
    assert distance(logits(stored, size=2), logits(plain)) < CASES[case][2]


def test_an_order_of_columns_is_not_split(folders):
    with pytest.raises((CheckpointError, ValueError), match="ranks cannot split"):
        logits(folders("gptq, act order")[0], size=2)


@pytest.mark.parametrize("case", ["gptq, act order", "awq", "compressed fp8 in blocks"])
def test_what_quants_stand_for_can_be_read_instead(case, folders):
    stored, plain = folders(case)
    assert distance(logits(stored, quantize="none"), logits(plain)) < EXACT


def test_parts_of_one_product_that_are_left_out(network, tmp_path):
    """k and v stay plain, beside q in fp8 and in int4; so does all of o."""
    for writer in (Fp8(128), Gptq(32)):
        stored, plain = write(tmp_path / type(writer).__name__, network, writer, ["k_proj", "v_proj", "o_proj"])
        loaded = load_network(stored, EngineOptions(pack_cache=False))
        packed = next(value for names, value in linears(loaded).items() if "q_proj" in names[0])
        assert packed.form.format.is_quantized and packed.next is not None
        assert str(packed.next.form.format) == "float32" and packed.next.n == 2 * 2 * 32 and packed.next.next is None
        assert distance(logits(stored), logits(plain)) < ROUNDED
        assert "float32" in loaded.report.bytes_by_format


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_delta_nets_whose_gates_are_left_out(family, tmp_path):
    """As they are published: b and a stay plain beside q, k, v and z of the same product."""
    hf = tiny_qwen3_5.make_network(family).float()
    gates = ["in_proj_ba", "in_proj_b", "in_proj_a", "mlp.gate", "shared_expert_gate"]
    stored, plain = write(tmp_path / family, hf, Fp8(32), gates)
    loaded = load_network(stored, EngineOptions(dtype="float32", pack_cache=False))
    packed = next(value for names, value in linears(loaded).items() if "in_proj" in names[0])
    assert packed.form.format.name == "fp8" and str(packed.next.form.format) == "float32"
    assert distance(logits(stored), logits(plain)) < EXACT


def test_gate_and_up_of_which_one_is_left_out(network, tmp_path, caplog):
    stored, plain = write(tmp_path / "model", network, Awq(32), ["up_proj"])
    assert distance(logits(stored), logits(plain)) < ROUNDED
    assert "not in one format: widened" in caplog.text


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_a_model_has_not(value, network, tmp_path):
    stored = write(tmp_path / "model", network, Gptq(32))[0]
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.bias"
    save_file(tensors | {name: torch.full((128,), value)}, stored / "model.safetensors")
    if value == 0:
        load_network(stored, EngineOptions(pack_cache=False))
    else:
        with pytest.raises(CheckpointError, match=f"of no use to the model:\n  {name}"):
            load_network(stored, EngineOptions(pack_cache=False))


def test_experts(tmp_path):
    torch.manual_seed(4)
    sizes = {**SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4, "mlp_only_layers": [1]}
    hf = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).float()
    separate = _with_separate_experts(hf)
    for writer, format in ((Awq(32), "uint4_zero in groups of 32"), (Fp8(None), "fp8")):
        stored, plain = write(tmp_path / type(writer).__name__, separate, writer, [".mlp.gate"])
        loaded = load_network(stored, EngineOptions(pack_cache=False))
        assert format in loaded.report.bytes_by_format
        sizes_by_format = loaded.report.bytes_by_format
        assert sizes_by_format[format] > 3 * 4 * 64 * 128 / 2  # the experts are in it
        assert distance(logits(stored), logits(plain)) < ROUNDED


class _Separate:
    """A model whose experts are linears of their own, as published checkpoints have them."""

    def __init__(self, hf, tensors):
        self.config, self._tensors = hf.config, tensors
        self.__class__ = type(type(hf).__name__, (_Separate,), {})

    def state_dict(self):
        return self._tensors

    def named_modules(self):
        for name, tensor in self._tensors.items():
            if name.endswith("_proj.weight") or name.endswith("mlp.gate.weight"):
                yield name.removesuffix(".weight"), torch.nn.Linear(*tensor.shape[::-1], bias=False, device="meta")


def _with_separate_experts(hf):
    tensors = {}
    for name, tensor in hf.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{stem}.{expert}.gate_proj.weight"] = gate
                tensors[f"{stem}.{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            for expert, down in enumerate(tensor):
                tensors[f"{stem}.{expert}.down_proj.weight"] = down
        else:
            tensors[name] = tensor
    return _Separate(hf, tensors)


def test_the_pack_cache_keeps_them(folders, tmp_path, monkeypatch):
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    stored = folders("gptq, act order")[0]
    first = logits(stored, pack_cache=True)
    loaded = load_network(stored, EngineOptions(dtype="float32"))
    assert loaded.report.from_cache
    assert torch.equal(logits(stored, pack_cache=True), first)


REFUSED = [
    (lambda: Gptq(32), {"bits": 3}, "bits is 3, expected 4, 8"),
    (lambda: Gptq(32), {"dynamic": {"a": {}}}, "settings of their own"),
    (lambda: Gptq(32, sym=False), {"sym": True}, "has zeros other than 8"),
    (lambda: Gptq(32), {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected gptq, gptq_v2"),
    (lambda: Awq(32), {"version": "gemv"}, "version is 'gemv', expected gemm"),
    (lambda: Awq(32), {"group_size": 64}, r"scales is \[8, 128\], expected \[4, 128\]"),
    (
        lambda: CompressedPacked(32),
        {"format": "marlin-24"},
        "its format is marlin-24 with 4 bits, which is not supported",
    ),
    (lambda: CompressedPacked(32), {"config_groups": {}}, "no group of its config names model.layers.0"),
    (lambda: Fp8(128), {"fmt": "e5m2"}, "fmt is 'e5m2'"),
    (lambda: Fp8(128), {"weight_block_size": [128]}, "expected two sizes"),
    (lambda: Fp8(128), {"weight_block_size": [64, 128]}, "weight_scale_inv is"),
]


@pytest.mark.parametrize(
    ("writer", "changed", "message"), REFUSED, ids=lambda given: given if type(given) is str else ""
)
def test_what_is_not_read_is_refused_by_name(writer, changed, message, network, tmp_path):
    folder = write(tmp_path / "model", network, writer())[0]
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"] |= changed
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=message):
        load_network(folder, EngineOptions(pack_cache=False))
