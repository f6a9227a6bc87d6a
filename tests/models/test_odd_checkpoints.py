"""Checkpoints that say or store things in other ways than the released ones: all as transformers reads them."""

import json

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file
from test_mllama import load_folder, save_tensors
from test_parity import expected, logits_of, relative

from tilewright.models.registry import family_of
from tilewright.models.text_config import config_as_stored, decoder_config
from tilewright.types import UnsupportedConfig
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load
from tilewright.weights.spec import iter_weights

PROMPT = tiny.text_prompt(75, 1)
# Three axes, for models that see.
WIDE_PROMPT = tiny.text_prompt(40, 1, num_axes=3)


def change_config(folder, change):
    config = tiny.config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_as_stored(folder):
    checkpoint = open_checkpoint(folder)
    config = config_as_stored(checkpoint)
    model = family_of(config).build(config, checkpoint.shapes)
    load(model, checkpoint, dtype=torch.float32, rename=model.checkpoint_name)
    return model


@pytest.mark.parametrize("name, prompt", [("llama_tied_biased", PROMPT), ("qwen3_vl", WIDE_PROMPT)])
def test_a_head_that_is_stored_beside_a_tied_table_is_used(networks, make_runner, tmp_path, caplog, name, prompt):
    hf, folder = networks(name)
    tables = [key for key in load_file(folder / "model.safetensors") if key.endswith("embed_tokens.weight")]
    other = torch.randn(tiny.VOCAB, 96, generator=torch.Generator().manual_seed(3))
    save_tensors(tmp_path, folder, lambda tensors: {**tensors, "lm_head.weight": other})
    theirs = type(hf).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(theirs.lm_head.weight, other)
    (ours,) = logits_of(make_runner(load_as_stored(tmp_path)), [prompt])
    assert relative(ours, expected(theirs, prompt)) < 1e-4
    assert f"tie_word_embeddings true, but lm_head.weight and {tables[0]} differ: both are used" in caplog.text
    caplog.clear()
    # The same table twice is one.
    save_tensors(tmp_path, folder, lambda tensors: {**tensors, "lm_head.weight": tensors[tables[0]].clone()})
    (ours,) = logits_of(make_runner(load_as_stored(tmp_path)), [prompt])
    assert relative(ours, expected(hf, prompt)) < 1e-4 and not caplog.records


def test_experts_stacked_in_one_tensor(networks, make_runner, tmp_path):
    hf, folder = networks("qwen3_moe")
    stacked = {key: tensor.clone() for key, tensor in hf.state_dict().items()}
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in stacked)
    save_tensors(tmp_path, folder, lambda tensors: stacked)
    (ours,) = logits_of(make_runner(load_folder(tmp_path)), [PROMPT])
    assert relative(ours, expected(hf, PROMPT)) < 1e-4


@pytest.mark.parametrize("name, prompt", [("qwen3", PROMPT), ("qwen3_vl", WIDE_PROMPT)])
def test_a_model_saved_without_its_head_has_other_names(networks, make_runner, tmp_path, name, prompt):
    hf, _ = networks(name)
    hf.model.save_pretrained(tmp_path)
    assert not any(key.startswith("model.") for key in load_file(tmp_path / "model.safetensors"))
    theirs = type(hf).from_pretrained(tmp_path, dtype=torch.float32).eval()
    config = json.dumps({**hf.config.to_dict(), "dtype": "float32"})
    (tmp_path / "config.json").write_text(config)
    (ours,) = logits_of(make_runner(load_folder(tmp_path)), [prompt])
    assert relative(ours, expected(hf, prompt)) < 1e-4 and relative(ours, expected(theirs, prompt)) < 1e-4


@pytest.mark.parametrize("expert_width", [96, 48, 192])  # of a model 96 wide: either projection may be square
@pytest.mark.parametrize("is_published", [True, False])
def test_either_order_of_stacked_experts(make_runner, tmp_path, expert_width, is_published):
    experts = {**tiny.EXPERTS, "moe_intermediate_size": expert_width}
    hf = tiny.network_of(tiny._vision_language(transformers.Qwen3VLMoeConfig, experts))
    source = tiny.save(hf, tmp_path / "saved")

    def in_order(tensors):
        stacked = {key: tensor.clone() for key, tensor in hf.state_dict().items()}
        swap = {key for key in stacked if ".experts." in key and is_published}
        return {key: tensor.mT.contiguous() if key in swap else tensor for key, tensor in stacked.items()}

    (tmp_path / "changed").mkdir()
    folder = save_tensors(tmp_path / "changed", source, in_order)
    (ours,) = logits_of(make_runner(load_folder(folder)), [WIDE_PROMPT])
    assert relative(ours, expected(hf, WIDE_PROMPT)) < 1e-4


@pytest.mark.parametrize("indexes", [[1, 0], [2, 0, 1], [2]])
def test_layers_of_deepstack_in_any_order(make_runner, tmp_path, indexes):
    config = transformers.Qwen3VLConfig(
        text_config={**tiny.TEXT, "num_hidden_layers": 4, "head_dim": 32, "rope_parameters": tiny.MROPE},
        vision_config={**tiny.VISION, "deepstack_visual_indexes": indexes},
        image_token_id=tiny.IMAGE,
        video_token_id=tiny.VIDEO,
        vision_start_token_id=tiny.START,
        vision_end_token_id=tiny.END,
    )
    hf = tiny.network_of(config)
    prompt = tiny.media_prompt(hf, [("image", (1, 6, 8))], 2)
    (ours,) = logits_of(make_runner(load_folder(tiny.save(hf, tmp_path))), [prompt])
    assert relative(ours, expected(hf, prompt)) < 1e-4


@pytest.mark.parametrize("indexes", [[0, 0], [3], [-1], "0"])
def test_deepstack_of_no_layer_is_refused(networks, tmp_path, indexes):
    _, folder = networks("qwen3_vl")
    save_tensors(tmp_path, folder, dict)
    change_config(tmp_path, lambda config: config["vision_config"].update(deepstack_visual_indexes=indexes))
    with pytest.raises(UnsupportedConfig, match=r"deepstack_visual_indexes .* expected some of its layers, 0 to 2"):
        load_folder(tmp_path)


@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen2"])
@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_parameters"])
def test_null_is_as_absent(tmp_path, make_runner, name, key):
    """With what transformers takes where a config says nothing."""
    known = {**tiny.TEXT, "num_key_value_heads": 4}  # as many as heads: the default
    config = type(tiny.CONFIGS[name])(**known, tie_word_embeddings=True, rms_norm_eps=1e-6)
    hf = tiny.network_of(config)
    folder = change_config(tiny.save(hf, tmp_path), lambda stored: stored.update({key: None}))
    (ours,) = logits_of(make_runner(load_folder(folder)), [PROMPT])
    assert relative(ours, expected(hf, PROMPT)) < 1e-4


def test_what_qwen3_vl_takes_for_granted(networks, tmp_path):
    _, folder = networks("qwen3_vl")
    config = open_checkpoint(folder).config
    text = {k: v for k, v in config["text_config"].items() if k not in ("head_dim", "rope_parameters", "rope_theta")}
    built = family_of(config).build({**config, "text_config": text}, {}).decoder.config.layers[0].attention
    theirs = transformers.Qwen3VLConfig(text_config=text).text_config
    assert (built.head_width, built.rope.theta) == (theirs.head_dim, theirs.rope_parameters["rope_theta"])


@pytest.mark.parametrize(
    "family, part, changes, message",
    [
        (
            "llama",
            None,
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "5 heads, expected a divisor of its width, 96",
        ),
        ("llama", None, {"num_key_value_heads": 3}, "num_key_value_heads 3, expected a divisor of .*, 4"),
        ("llama", None, {"num_key_value_heads": 0}, "num_key_value_heads 0, expected a divisor"),
        ("llama", None, {"rms_norm_eps": "1e-5"}, "rms_norm_eps '1e-5', expected a number"),
        ("llama", None, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x', expected a number"),
        ("qwen3_vl", "vision_config", {"num_heads": 5}, "5 heads, expected a divisor of its width, 72"),
        ("qwen3_vl", "vision_config", {"num_heads": 4}, "heads of 18, expected a multiple of 4"),
        ("mllama", "vision_config", {"attention_heads": 7}, "7 heads, expected a divisor of its width, 72"),
    ],
)
def test_sizes_that_cannot_be(networks, tmp_path, family, part, changes, message):
    _, folder = networks(family)
    save_tensors(tmp_path, folder, dict)
    change_config(tmp_path, lambda config: (config[part] if part else config).update(changes))
    with pytest.raises(UnsupportedConfig, match=message):
        load_folder(tmp_path)


def test_heads_of_a_vision_tower_may_be_of_another_width(networks, tmp_path):
    _, folder = networks("qwen3_vl")
    config = open_checkpoint(folder).config
    vision = {**config["vision_config"], "head_dim": 32}
    model = family_of(config).build({**config, "vision_config": vision}, {})
    shapes = {source.name: source.shape for weight in iter_weights(model.vision) for source in weight.sources}
    assert shapes["model.visual.blocks.0.attn.qkv.weight"] == (3 * 3 * 32, 72)
    assert shapes["model.visual.blocks.0.attn.proj.weight"] == (72, 3 * 32)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"hidden_size": 96, "head_dim": 40}, 40),
        ({"hidden_size": 96, "head_dim": None}, 24),
        ({"hidden_size": 96}, 24),
        ({"hidden_size": 96, "qk_head_dim": 48}, 48),
        ({"hidden_size": 96, "head_dim": None, "qk_head_dim": 48}, 48),
        ({"d_model": 64}, 16),
        ({"hidden_size": None, "d_model": 64}, 16),
    ],
)
def test_the_width_of_a_head_is_found_in_any_config(given, expected):
    text = {key: value for key, value in tiny.TEXT.items() if key != "hidden_size"}
    assert decoder_config({**text, **given}).layers[0].attention.head_width == expected
