"""Qwen3-VL as two GGUF files, a language model and its projector, is the Qwen3-VL they were made of."""

import re

import numpy as np
import pytest
import tiny
import tiny_checkpoint
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import quants
from PIL import Image
from test_parity import expected, logits_of, relative
from vision_gguf import _projector_tensors, stored_kind, write_projector, write_text

import tilewright
from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.types import RequestError
from tilewright.weights.checkpoint import CheckpointError, open_checkpoint

# Rows of whole blocks of 32, and a deepstack layer that is not where its merger is in the list.
WIDE = {**tiny.VISION, "hidden_size": 96, "num_heads": 4, "intermediate_size": 128, "deepstack_visual_indexes": [0, 2]}


def make_network(**vision):
    config = tiny.CONFIGS["qwen3_vl"].to_dict() | {"vision_config": {**WIDE, **vision}}
    return tiny.network_of(transformers.Qwen3VLConfig(**config), seed=7)


@pytest.fixture(scope="module")
def network():
    return make_network()


@pytest.fixture
def pair(network, tmp_path):
    """Both files in one folder; the language model's path."""
    write_projector(network, tmp_path / "mmproj-F32.gguf")
    return write_text(network, tmp_path / "text.gguf")


def prompts(network):
    return [
        tiny.text_prompt(20, 1, num_axes=3),
        tiny.media_prompt(network, [("image", (1, 4, 4)), ("image", (1, 10, 6))], 3),
        tiny.media_prompt(network, [("video", (3, 4, 6)), ("image", (1, 8, 4))], 4),
    ]


@pytest.mark.parametrize("name", tiny.VISION_FAMILIES)
def test_features_and_logits_are_those_of_the_same_weights(name, networks, models, make_runner, tmp_path):
    hf, _ = networks(name)
    write_projector(hf, tmp_path / "mmproj-F32.gguf")
    loaded = load_network(write_text(hf, tmp_path / "text.gguf"), EngineOptions(dtype="float32", pack_cache=False))
    assert loaded.config["model_type"] == name
    ids = {key: value for key, value in loaded.config.items() if key.endswith("_token_id")}
    assert ids == {key: getattr(hf.config, key) for key in ids} and len(ids) == 4
    stored = models(name, torch.float32)
    for prompt in prompts(hf):
        if prompt.inputs.media:
            ours, theirs = (tiny.encode(model, prompt.inputs, torch.float32) for model in (loaded.model, stored))
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        (ours,) = logits_of(make_runner(loaded.model), [prompt])
        (theirs,) = logits_of(make_runner(stored), [prompt])
        # The file has eps in fp32, config.json in decimals.
        assert relative(ours, theirs) < 1e-6
        assert relative(ours, expected(hf, prompt)) < 1e-4


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0], ids=lambda kind: kind.name)
def test_every_tensor_is_read(network, tmp_path, kind):
    text = write_text(network, tmp_path / "text.gguf")
    write_projector(network, tmp_path / "mmproj.gguf", kind)
    checkpoint = open_checkpoint(text)
    tower = {name: tensor for name, tensor in network.state_dict().items() if name.startswith("model.visual.")}
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name.startswith("model.visual.")}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tower.items()}
    kinds = set()
    for name, tensor in tower.items():
        parts = _projector_tensors(name.removeprefix("model."), tensor.numpy(), network.config.vision_config)
        kinds |= (own := {stored_kind(stored_name, part, kind) for stored_name, part in parts.items()})
        (one,) = own
        values = quants.dequantize(quants.quantize(tensor.numpy(), one), one).reshape(tensor.shape)
        got = checkpoint.read(name)
        assert got.dtype == checkpoint.dtype(name) and torch.equal(got.float(), torch.from_numpy(values.copy())), name
        assert torch.equal(checkpoint.rows(name, 3, 9), got[3:9])
        assert (checkpoint.quantized_as(name) is not None) == (one == Type.Q8_0)
        checkpoint.release(name)
    assert kind in kinds


def test_frames_of_two_types(network, tmp_path):
    """Earlier converters left the second one in fp32."""

    def second_in_fp32(writer):
        add = writer.add_tensor

        def adding(name, tensor, raw_dtype=None):
            if name.endswith(".weight.1"):
                tensor, raw_dtype = quants.dequantize(tensor, raw_dtype), Type.F32
            add(name, tensor, raw_dtype=raw_dtype)

        writer.add_tensor = adding

    text = write_text(network, tmp_path / "text.gguf")
    write_projector(network, tmp_path / "mmproj.gguf", Type.F16, second_in_fp32)
    checkpoint, name = open_checkpoint(text), "model.visual.patch_embed.proj.weight"
    assert checkpoint.dtype(name) == checkpoint.read(name).dtype == torch.float32
    assert torch.equal(checkpoint.read(name), network.state_dict()[name].half().float())
    assert checkpoint.size_bytes(name) == 6 * checkpoint.read(name).numel() // 2


def test_bytes_stay_bytes(network, tmp_path):
    """A Q8_0 projector is multiplied as such; its features are those of what it stands for, up to 8-bit activations."""
    text = write_text(network, tmp_path / "text.gguf")
    write_projector(network, tmp_path / "mmproj-Q8_0.gguf", Type.Q8_0)
    packed, widened = (
        load_network(text, EngineOptions(dtype="float32", pack_cache=False, quantize=name)) for name in (None, "none")
    )
    assert "int8 in groups of 32" in packed.report.bytes_by_format and list(widened.report.bytes_by_format) == [
        "float32"
    ]
    (prompt,) = prompts(network)[1:2]
    ours, plain = (torch.cat(tiny.encode(each.model, prompt.inputs, torch.float32)) for each in (packed, widened))
    assert 0 < (ours - plain).norm() < 0.05 * plain.norm()


def test_its_deepstack_layers_and_settings_are_the_files(network, pair, tmp_path):
    config = open_checkpoint(pair).config
    vision = {key: value for key, value in config["vision_config"].items() if key not in ("head_dim", "hidden_act")}
    assert vision == {key: getattr(network.config.vision_config, key) for key in vision}
    assert config["text_config"]["rope_scaling"] == {
        "rope_type": "default",
        "mrope_section": tiny.MROPE["mrope_section"],
        "mrope_interleaved": True,
    }
    assert config["preprocessor_config"] == {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    before = open_checkpoint(pair).fingerprint
    write_projector(network, tmp_path / "mmproj-F32.gguf", extra=lambda writer: writer.add_vision_min_pixels(1024))
    assert open_checkpoint(pair).config["preprocessor_config"]["min_pixels"] == 1024
    assert open_checkpoint(pair).fingerprint != before


def picture(seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 56, 3), dtype=np.uint8))


def about(image):
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]}]


def test_an_engine_sees_with_both_files_and_says_what_is_missing_with_one(tmp_path):
    folder = tiny_checkpoint.write_vision_model(tmp_path / "folder")
    hf = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder)

    def sizes(writer):
        writer.add_vision_min_pixels(256)
        writer.add_vision_max_pixels(4096)

    def template(writer):
        writer.add_chat_template(tiny_checkpoint.TEMPLATE.replace("<|end|>", ""))
        writer.add_eos_token_id(tiny_checkpoint.FIRST_SPECIAL)

    (folder / "chat_template.jinja").write_text(tiny_checkpoint.TEMPLATE.replace("<|end|>", ""))
    files = tmp_path / "files"
    files.mkdir()
    text = write_text(hf, files / "Tiny-Q4.gguf", extra=template)
    options = {"dtype": "float32", "kv_memory": "20MB", "max_context": 512, "pack_cache": False}
    projector = write_projector(hf, files / "mmproj-Tiny-F32.gguf", extra=sizes)
    answers = []
    for model in (folder, text):
        with tilewright.Engine(model, **options) as engine:
            assert engine.loaded.processor.accepts == ("image", "video")
            found = [engine.chat(about(picture(seed)), max_tokens=8, temperature=0.0) for seed in (0, 1)]
            answers.append([(answer.token_ids, answer.num_prompt_tokens) for answer in found])
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]
    projector.unlink()
    with tilewright.Engine(text, **options) as engine:
        assert engine.chat([{"role": "user", "content": "Hello"}], max_tokens=4).token_ids
        message = r"image 1: Tiny-Q4\.gguf has no projector.* put the model's mmproj-\*\.gguf into the same folder"
        with pytest.raises(RequestError, match=message):
            engine.chat(about(picture()), max_tokens=1)
        with pytest.raises(RequestError, match=message):
            engine.generate("a", images=[picture()], max_tokens=1)


def test_text_alone_is_what_the_model_with_its_projector_says(network, pair, make_runner):
    both, alone = (
        load_network(pair, EngineOptions(dtype="float32", pack_cache=False, mmproj=name)) for name in (None, "none")
    )
    assert (both.config["model_type"], alone.config["model_type"]) == ("qwen3_vl", "qwen3")
    assert alone.checkpoint.missing.startswith("text.gguf was opened with mmproj none, without its projector")
    (seeing,) = logits_of(make_runner(both.model), [tiny.text_prompt(20, 1, num_axes=3)])
    (reading,) = logits_of(make_runner(alone.model), [tiny.text_prompt(20, 1)])
    assert torch.equal(seeing, reading)


def test_of_several_projectors_the_one_that_fits_is_read_or_one_is_named(network, pair, tmp_path):
    other = tiny.network_of(
        transformers.Qwen3VLConfig(
            **tiny.CONFIGS["qwen3_vl"].to_dict()
            | {
                "vision_config": {**WIDE, "out_hidden_size": 64},
                "text_config": {**tiny.CONFIGS["qwen3_vl"].text_config.to_dict(), "hidden_size": 64},
            }
        )
    )
    write_projector(other, tmp_path / "mmproj-other.gguf")
    (tmp_path / "half-a-download.gguf").write_bytes(b"GGUF\x03")
    assert open_checkpoint(pair).config["vision_config"]["out_hidden_size"] == 96
    second = write_projector(network, tmp_path / "projector-F16.gguf", Type.F16)  # found by what it says it is
    names = re.escape(
        "2 projectors beside it that fit, mmproj-F32.gguf, projector-F16.gguf: name one of them with --mmproj"
    )
    with pytest.raises(CheckpointError, match=names):
        open_checkpoint(pair)
    for name in (second, str(second), "projector-F16.gguf"):
        assert open_checkpoint(pair, name).dtype("model.visual.blocks.0.attn.qkv.weight") == torch.float16
    with pytest.raises(CheckpointError, match=r"mmproj is nowhere\.gguf, which does not exist; .*mmproj-F32\.gguf"):
        open_checkpoint(pair, "nowhere.gguf")
    with pytest.raises(CheckpointError, match=r"mmproj-other\.gguf makes features 64 wide, but text\.gguf expects 96"):
        open_checkpoint(pair, "mmproj-other.gguf")
    with pytest.raises(CheckpointError, match="has the architecture 'qwen3vl', expected 'clip'"):
        open_checkpoint(pair, pair)
    for path in (second, tmp_path / "mmproj-F32.gguf"):
        path.unlink()
    with pytest.raises(
        CheckpointError, match=r"64 wide, but text\.gguf expects 96: .*or --mmproj none to read text alone"
    ):
        open_checkpoint(pair)
    assert open_checkpoint(pair, "none").missing is not None


def set_key(name: str, value):
    """Changes a key of the file."""

    def change(writer):
        for shard in writer.kv_data:
            if name in shard:
                shard[name].value = value

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        (
            set_key("clip.projector_type", "qwen2.5vl_merger"),
            "of the kind 'qwen2.5vl_merger'; 'qwen3vl_merger' is supported",
        ),
        (lambda writer: writer.add_clip_has_audio_encoder(True), "is a projector of sound too"),
        (set_key("clip.use_gelu", False), "has no clip.use_gelu that is true"),
        (set_key("clip.vision.image_std", [0.5, 0.0, 0.5]), "no deviation of 0"),
        (set_key("clip.vision.image_mean", [0.5]), "clip.vision.image_mean is [0.5], expected a list of 3 numbers"),
        (set_key("clip.vision.patch_size", 14), "expected two kernels of 3 x 14 x 14"),
        (set_key("clip.vision.block_count", 0), "clip.vision.block_count is 0, expected 1 or more"),
    ],
)
def test_projectors_it_cannot_run(network, tmp_path, change, message):
    text = write_text(network, tmp_path / "text.gguf")
    write_projector(network, tmp_path / "mmproj.gguf", extra=change)
    with pytest.raises(CheckpointError, match=f"mmproj.gguf.*{re.escape(message)}"):
        open_checkpoint(text)


def test_incomplete_and_mismatched_projectors(network, tmp_path):
    text = write_text(network, tmp_path / "text.gguf")
    path = tmp_path / "mmproj.gguf"
    write_projector(network, path, without=("v.patch_embd.weight.1",))
    with pytest.raises(CheckpointError, match=r"has no v\.patch_embd\.weight\.1: it is not a whole projector"):
        open_checkpoint(text)
    write_projector(network, path, without=("v.blk.1.ln2.bias",))
    with pytest.raises(CheckpointError, match=r"missing:\s+model\.visual\.blocks\.1\.norm2\.bias \[96\]"):
        load_network(text, EngineOptions(dtype="float32", pack_cache=False))
    write_projector(make_network(deepstack_visual_indexes=[1]), path)
    with pytest.raises(CheckpointError, match=r"features of 1 of its layers beside the last, but text\.gguf expects 2"):
        open_checkpoint(text)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"mmproj\.gguf is truncated"):
        open_checkpoint(text)


def test_language_models_it_cannot_see_with(network, pair, tmp_path):
    with pytest.raises(CheckpointError, match=r"mmproj-F32\.gguf is a projector of images \(mmproj\) alone"):
        open_checkpoint(tmp_path / "mmproj-F32.gguf")
    write_text(network, pair, extra=set_key("qwen3vl.rope.dimension_sections", [6, 5, 4, 1]))
    with pytest.raises(CheckpointError, match="has 1 on a fourth axis, expected 0"):
        open_checkpoint(pair)
    tokens = ["t"] * network.config.text_config.vocab_size
    write_text(network, pair, extra=set_key("tokenizer.ggml.tokens", tokens))
    with pytest.raises(CheckpointError, match=r"its vocabulary has no <\|image_pad\|>, <\|video_pad\|>"):
        open_checkpoint(pair)
    folder = tiny.save(network, tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"folder is a folder: projector files go with GGUF files"):
        open_checkpoint(folder, "mmproj-F32.gguf")
