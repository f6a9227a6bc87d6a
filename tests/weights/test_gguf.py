"""GGUF files written by the format's own library, read as a Hugging Face checkpoint; and broken ones refused."""

import os
import re
import struct

import gguf
import numpy as np
import pytest
import torch
from core_answers import CoreAnswers
from gguf import GGMLQuantizationType as Type
from gguf import quants

from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.ops.quantized import concatenate, dequantize, quantize
from tilewright.types import ModelInputs, SamplingParams
from tilewright.weights.checkpoint import CheckpointError, open_checkpoint
from tilewright.weights.conv import Unpacked
from tilewright.weights.dequantize import FORMATS
from tilewright.weights.gguf.quants import SPLITS, common_format, in_format
from tilewright.weights.linear import LinearWeight
from tilewright.weights.load import load
from tilewright.weights.spec import PADDING, Shard

HEADS, KV_HEADS, HEAD_WIDTH, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 2, 32, 256, 512, 96
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOKENS = ["<s>", "é", "日本"] + [f"t{i}" for i in range(VOCABULARY - 3)]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def model_tensors(architecture: str) -> dict[str, np.ndarray]:
    """A model of one layer under Hugging Face's names."""
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": random(HIDDEN),
        f"{layer}input_layernorm.weight": random(HIDDEN),
        f"{layer}post_attention_layernorm.weight": random(HIDDEN),
        f"{layer}self_attn.q_proj.weight": random(HEADS * HEAD_WIDTH, HIDDEN),
        f"{layer}self_attn.k_proj.weight": random(KV_HEADS * HEAD_WIDTH, HIDDEN),
        f"{layer}self_attn.v_proj.weight": random(KV_HEADS * HEAD_WIDTH, HIDDEN),
        f"{layer}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_WIDTH * 2)[:, : HEADS * HEAD_WIDTH].copy(),
        f"{layer}mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{layer}mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN) + 1,
        f"{layer}mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
    }
    if architecture in ("qwen2", "llama"):
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{layer}self_attn.{name}_proj.bias"] = random(rows * HEAD_WIDTH)
    if architecture == "qwen3":
        tensors[f"{layer}self_attn.q_norm.weight"] = random(HEAD_WIDTH)
        tensors[f"{layer}self_attn.k_norm.weight"] = random(HEAD_WIDTH) + 1
    return tensors


def gguf_name(name: str) -> str:
    """The format's own table of names is the oracle of ours."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
    return table.get_name(name, try_suffixes=(".weight", ".bias")) or name


def permuted(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as converters to GGUF store them for llama: of a head's two halves, in turn."""
    heads = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)


def write(path, architecture: str, tensors: dict[str, np.ndarray], kind: Type = Type.F32, extra=lambda writer: None):
    """The file, and the values a reader must find, in Hugging Face's order of rows."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([float(i) for i in range(VOCABULARY)])
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    extra(writer)
    expected = {}
    for name, tensor in tensors.items():
        stored = tensor
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else None
        if architecture == "llama" and heads:
            stored = permuted(tensor, heads)
        stored_kind = kind if tensor.ndim == 2 else Type.F32
        data = quants.quantize(stored, stored_kind)
        values = quants.dequantize(data, stored_kind).reshape(tensor.shape)
        if architecture == "llama" and heads:
            values = values.reshape(heads, HEAD_WIDTH // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        expected[name] = torch.from_numpy(values.copy())
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


QUANTISED = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
KINDS = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors(tmp_path, architecture, kind):
    tensors = model_tensors(architecture)
    expected = write(tmp_path / "m.gguf", architecture, tensors, kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, values in expected.items():
        got = checkpoint.read(name)
        assert got.dtype == checkpoint.dtype(name) and torch.equal(got.float(), values), name
        rows = values.shape[0]
        for begin, end in ((0, 1), (rows // 3, rows // 3 + 5), (rows - 7, rows), (0, rows)):
            assert torch.equal(checkpoint.rows(name, begin, end).float(), values[begin:end]), (name, begin)
        checkpoint.release(name)
    if kind == Type.F32:
        for name, values in expected.items():
            assert torch.equal(values, torch.from_numpy(tensors[name])), name


def test_config_and_tokenizer(tmp_path):
    write(tmp_path / "m.gguf", "qwen3", model_tensors("qwen3"))
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.files is None and checkpoint.path == tmp_path / "m.gguf"
    assert checkpoint.config == {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-5),
        "max_position_embeddings": 1024,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    metadata = checkpoint.tokenizer_metadata
    assert metadata["tokenizer.ggml.tokens"] == TOKENS and metadata["tokenizer.chat_template"] == TEMPLATE
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.scores"] == [float(i) for i in range(VOCABULARY)]
    assert not any(key.startswith("general.") for key in metadata)


def test_heads_tied_or_not_and_more_ends(tmp_path):
    tensors = model_tensors("qwen2") | {"lm_head.weight": random(VOCABULARY, HIDDEN)}
    write(tmp_path / "m.gguf", "qwen2", tensors, extra=lambda writer: writer.add_eot_token_id(5))
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert config["tie_word_embeddings"] is False and config["attention_bias"] is True
    assert config["eos_token_id"] == [2, 5]


def llama3_factors(theta: float, factor: float) -> np.ndarray:
    """As Llama 3.1's converter works them out: a full turn longer than 8192 is stretched, one under 2048 is not."""
    factors = []
    for i in range(HEAD_WIDTH // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / HEAD_WIDTH)
        smooth = (8192 / wavelength - 1) / 3
        factors.append(factor if smooth < 0 else 1 if smooth > 1 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_scaled_positions(tmp_path):
    path = tmp_path / "m.gguf"
    tensors = model_tensors("llama")
    write(path, "llama", tensors | {"rope_freqs.weight": llama3_factors(50000.0, 8.0)})
    checkpoint = open_checkpoint(path)
    assert "rope_freqs.weight" not in checkpoint.shapes
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write(path, "llama", tensors | {"rope_freqs.weight": llama3_factors(50000.0, 8.0)[::-1].copy()})
    with pytest.raises(CheckpointError, match="follows no rule that is known"):
        open_checkpoint(path)

    def yarn(writer) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    write(path, "qwen3", model_tensors("qwen3"), extra=yarn)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert open_checkpoint(path).config["rope_scaling"] == expected
    write(path, "qwen3", model_tensors("qwen3"), extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(CheckpointError, match="scales its positions by 'longrope'"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_quants(tmp_path, architecture, kind):
    """What they stand for is what the tensors are."""
    tensors = {name: tensor for name, tensor in model_tensors(architecture).items() if tensor.ndim == 2}
    expected = write(tmp_path / "m.gguf", architecture, tensors, kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name, values in expected.items():
        rows = values.shape[0]
        for begin, end in ((0, 1), (rows // 3, rows // 3 + 5), (0, rows)):
            taken = checkpoint.quantized_rows(name, begin, end)
            assert (taken.name, taken.group_size) == checkpoint.quantized_as(name)
            assert torch.allclose(dequantize(taken), values[begin:end], rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_quants_of_superblocks(kind):
    """The library writes none of these: any bytes are blocks, once their scales are small. Rounded to fp16 here."""
    format = next(format for format in FORMATS.values() if format.name == kind.name)
    data = np.random.default_rng(1).integers(0, 256, (6, format.block_bytes), dtype=np.uint8)
    for offset in (208,) if kind == Type.Q6_K else (0, 2):
        data[:, offset : offset + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    expected = torch.from_numpy(quants.dequantize(data, kind)).view(3, 512)
    taken = SPLITS[kind.name].rows(torch.from_numpy(data).flatten(), 3)
    assert (dequantize(taken) - expected).abs().max() <= 2**-10 * expected.abs().max()


def test_loading_keeps_quants(tmp_path):
    expected = write(tmp_path / "m.gguf", "llama", model_tensors("llama"), Type.Q4_1)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    attention = "model.layers.0.self_attn."
    parts = [(f"{attention}{name}_proj", rows * HEAD_WIDTH) for name, rows in (("q", 4), ("k", 2), ("v", 2))]
    whole = LinearWeight(parts, HIDDEN, bias=True)
    split = LinearWeight(
        [(name, rows, Shard(((rows // 2, rows // 2), (PADDING, 7)))) for name, rows in parts],
        HIDDEN,
        column_shard=Shard(((64, 128), (PADDING, 32))),
    )
    for weight in (whole, split):
        rename = {source.name: source.name for source in weight.sources}.get
        load([weight], checkpoint, dtype=torch.float32, rename=rename)
        assert str(weight.value.form.format) == "uint4 in groups of 32"
    values = [expected[f"{name}.weight"] for name, _ in parts]
    assert torch.allclose(whole.value.unpack(), torch.cat(values), rtol=1e-6, atol=1e-6)
    own = torch.cat([torch.nn.functional.pad(part[len(part) // 2 :, 64:192], (0, 32, 0, 7)) for part in values])
    assert torch.allclose(split.value.unpack(), own, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_logits_of_quants_are_those_of_what_they_stand_for(tmp_path, kind):
    """Up to the rounding of activations to 8 bits, through q and k rows in the file's order and a tied head."""
    tensors = {name: tensor for name, tensor in model_tensors("llama").items() if not name.endswith(".bias")}
    scaled = {name: tensor / 16 if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    write(tmp_path / "m.gguf", "llama", scaled, kind)
    inputs = ModelInputs(tuple(range(3, 40)), np.arange(37)[None], 37)
    found = {}
    for name in (None, "none"):
        network = load_network(tmp_path / "m.gguf", EngineOptions(dtype="float32", quantize=name, pack_cache=False))
        core = CoreAnswers(network.model, torch.float32, page_size=32, replay=False)
        run, kept = core.core.runner.run, []
        core.core.runner.run = lambda step, run=run, kept=kept: kept.append(run(step).clone()) or kept[-1]
        core.to([inputs], SamplingParams(max_tokens=1, temperature=0.0))
        found[name] = kept[0]
        assert (list(network.report.bytes_by_format) == ["float32"]) == (name == "none")
    assert 0 < (found[None] - found["none"]).norm() < 0.03 * found["none"].norm()


def test_parts_of_several_formats_are_kept_in_bytes():
    weight = torch.from_numpy(random(6, 256))
    parts = [quantize(weight, *format) for format in (("uint4", 32), ("int8", 16), ("int4", 32))]
    format = common_format([(part.name, part.group_size) for part in parts])
    assert format == ("int8_min", 16) and common_format([("int4", 32), ("int8", 16)]) == ("int8", 16)
    together = concatenate([in_format(part, format) for part in parts])
    assert torch.equal(dequantize(together), torch.cat([dequantize(part) for part in parts]))


def test_quants_are_widened_on_demand(tmp_path):
    expected = write(tmp_path / "m.gguf", "llama", model_tensors("llama"), Type.Q4_1)
    attention = "model.layers.0.self_attn."
    parts = [(f"{attention}{name}_proj", rows * HEAD_WIDTH) for name, rows in (("q", 4), ("k", 2), ("v", 2))]
    qkv, norm = LinearWeight(parts, HIDDEN, bias=True), Unpacked("model.norm.weight", HIDDEN)
    used = {source.name for weight in (qkv, norm) for source in weight.sources}
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    rename = {name: name for name in used}.get
    load([qkv, norm], checkpoint, dtype=torch.float32, rename=rename, keep_quants=False)
    assert str(qkv.value.form.format) == "float32"
    assert torch.equal(qkv.value.unpack(), torch.cat([expected[f"{name}.weight"] for name, _ in parts]))
    assert torch.equal(norm.value, expected["model.norm.weight"])


def test_tensors_it_has_no_name_for_are_listed(tmp_path):
    write(tmp_path / "m.gguf", "llama", model_tensors("llama") | {"blk.0.odd.weight": random(3)})
    with pytest.raises(CheckpointError, match=r"of no use to the model:[\s\S]*blk\.0\.odd\.weight \[3\]"):
        load([], open_checkpoint(tmp_path / "m.gguf"), dtype=torch.float32)


@pytest.mark.parametrize(
    "architecture,extra,message",
    [
        ("gemma3", lambda w: None, "has the architecture 'gemma3'; those supported are llama, qwen2, qwen3"),
        ("llama", lambda w: w.add_expert_count(8), "is a mixture of experts"),
        ("llama", lambda w: w.add_uint16("split.count", 3), "is one of 3 parts"),
        ("llama", lambda w: w.add_string("llama.attention.layer_norm_rms_epsilon", "x"), "is 'x', expected float"),
        ("llama", lambda w: w.add_uint32("llama.block_count", 0), "llama.block_count is 0, expected 1 or more"),
        ("llama", lambda w: w.add_uint32("llama.attention.head_count_kv", 5), "has 64 rows for 5 heads"),
        ("llama", lambda w: w.add_uint32("general.alignment", 0), "impossible general.alignment 0"),
    ],
)
def test_models_it_cannot_run(tmp_path, architecture, extra, message):
    def overriding(writer) -> None:
        before = [dict(shard) for shard in writer.kv_data]
        for shard in writer.kv_data:
            shard.clear()
        extra(writer)
        for shard, old in zip(writer.kv_data, before, strict=True):
            new = dict(shard)
            shard.clear()
            shard.update(old | new)

    write(tmp_path / "m.gguf", architecture, model_tensors("llama"), extra=overriding)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_type_it_cannot_read_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "llama", model_tensors("llama"), Type.Q4_0)
    data = path.read_bytes()
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 16  # rank, two sizes
    assert struct.unpack_from("<I", data, at) == (2,)
    path.write_bytes(data[:at] + struct.pack("<I", 10) + data[at + 4 :])
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight has the type Q2_K; those supported are F32, F16, BF16"
    ):
        open_checkpoint(path)


def small_file(path) -> bytes:
    write(path, "qwen3", {"model.embed_tokens.weight": random(4, 32), "model.norm.weight": random(8)}, Type.Q8_0)
    return path.read_bytes()


def test_every_cut_of_a_file_is_found(tmp_path):
    path = tmp_path / "m.gguf"
    whole = small_file(path)
    for size in [*range(0, len(whole), 7), len(whole) - 40]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_no_damage_does_more_than_an_error(tmp_path):
    path = tmp_path / "m.gguf"
    whole = small_file(path)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for at in generator.integers(0, len(data), 3):
            data[at] = generator.integers(0, 256)
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.shapes:
                checkpoint.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "data,message",
    [
        (b"PK\x03\x04" + bytes(60), "is a ZIP archive"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1, expected 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "expected 2 or 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "is truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "k claims"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 5, 2**62), "k claims"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "k has a value of the unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "k is an array of arrays"),
    ],
)
def test_lying_headers(tmp_path, data, message):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(tmp_path / "m.gguf")


def test_version_2_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    expected = write(path, "qwen3", model_tensors("qwen3"))
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("model.norm.weight"), expected["model.norm.weight"])


def test_the_fingerprint_tells_files_apart(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "qwen3", model_tensors("qwen3"))
    first = open_checkpoint(path).fingerprint
    assert open_checkpoint(path).fingerprint == first
    os.utime(path, (1e9, 1e9))
    assert open_checkpoint(path).fingerprint != first
