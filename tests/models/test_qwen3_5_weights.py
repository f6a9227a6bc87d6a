"""Checkpoints of the Qwen3.5 family: names, formats of experts, types, what is refused, and the released sizes."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_qwen3_5
import torch
import transformers
from hand_batches import Hands
from safetensors.torch import load_file
from test_mllama import load_folder, save_tensors

from tilewright.layers.gated_delta import GatedDeltaConfig
from tilewright.models.qwen3_5.model import FAMILIES
from tilewright.models.registry import family_of
from tilewright.types import UnsupportedConfig
from tilewright.weights.checkpoint import CheckpointError
from tilewright.weights.spec import iter_weights

REAL_CONFIGS = Path(__file__).parents[1] / "data" / "qwen3_5_configs.json"
BILLIONS = {"0.8B": 0.87, "2B": 2.2, "4B": 4.5, "9B": 9.4, "27B": 27.4, "35B-A3B": 35.1}
PROMPT = tiny.text_prompt(30, 7)


def sources_of(model):
    return {source.name: source.shape for weight in iter_weights(model) for source in weight.sources}


def num_parameters(model):
    return sum(torch.Size(shape).numel() for shape in sources_of(model).values())


def delta_layers(model):
    specs = model.decoder.config.layers
    return [i for i, spec in enumerate(specs) if isinstance(spec.attention, GatedDeltaConfig)]


@pytest.mark.parametrize("size", BILLIONS)
def test_released_sizes(size):
    """Every name and shape of the released models, from their configs, is transformers'; no memory is taken."""
    config = json.loads(REAL_CONFIGS.read_text())[size]
    classes = {"qwen3_5": transformers.Qwen3_5Config, "qwen3_5_moe": transformers.Qwen3_5MoeConfig}
    theirs = classes[config["model_type"]](**config)
    with torch.device("meta"):
        network = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(theirs)](theirs)
    model = family_of(config).build(config, {})
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert sources_of(model) == {name: shape for name, shape in wanted.items() if model.checkpoint_name(name)}
    assert num_parameters(model) / 1e9 == pytest.approx(BILLIONS[size], rel=0.02)
    text = config["text_config"]
    assert model.kv_spec.num_layers == text["layer_types"].count("full_attention")
    states = model.state_spec
    assert states.num_layers + model.kv_spec.num_layers == text["num_hidden_layers"]
    heads = text["linear_num_value_heads"]
    assert states.conv_shape == (3, 4096 + heads * 128) and states.delta_shape == (heads, 128, 128)
    assert states.bytes_per_slot(2) == states.num_layers * (3 * (4096 + heads * 128) * 2 + heads * 128 * 128 * 4)


def logits_of(folder, dtype=torch.float32):
    return Hands(load_folder(folder, dtype), dtype).run(PROMPT.inputs)


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next"])
def test_experts_stacked_and_apart(networks, tmp_path, name):
    """transformers writes a tensor per expert; released checkpoints have all of a layer in one, as its networks do."""
    hf, folder = networks(name)
    assert any(".experts.0." in key for key in load_file(folder / "model.safetensors"))
    tied = {"lm_head.weight"} if hf.config.tie_word_embeddings else set()
    stacked = {key: tensor.clone() for key, tensor in hf.state_dict().items() if key not in tied}
    assert not any(".experts.0." in key for key in stacked)
    save_tensors(tmp_path, folder, lambda tensors: stacked)
    assert torch.equal(logits_of(tmp_path), logits_of(folder))


def test_a_text_model_under_the_names_it_has_in_one_that_sees(networks, tmp_path):
    _, folder = networks("qwen3_5_text")

    def rename(tensors):
        renamed = {key.replace("model.", "model.language_model.", 1): item for key, item in tensors.items()}
        return {**renamed, "model.visual.pos_embed.weight": torch.zeros(4, 4)}

    save_tensors(tmp_path, folder, rename)
    assert torch.equal(logits_of(tmp_path), logits_of(folder))


def test_few_values_that_steer_many_stay_fp32(networks, tmp_path):
    """A_log, dt_bias and the norm of a recurrent layer; stored in bf16 they are widened, and nothing else is lost."""
    _, folder = networks("qwen3_5_text")
    rounded = ("A_log", "dt_bias", "linear_attn.norm.weight")

    def narrow(tensors):
        return {key: item.bfloat16() if key.endswith(rounded) else item for key, item in tensors.items()}

    save_tensors(tmp_path, folder, narrow)
    net = next(layer.attention for layer in load_folder(tmp_path, torch.bfloat16).decoder.layers[1:])
    assert net.a_log.value.dtype == net.dt_bias.value.dtype == net.norm.value.dtype == torch.float32
    exact = next(layer.attention for layer in load_folder(folder, torch.bfloat16).decoder.layers[1:])
    assert torch.equal(net.a_log.value, exact.a_log.value.bfloat16().float())
    assert not torch.equal(net.a_log.value, exact.a_log.value)
    truth = tmp_path / "widened"
    truth.mkdir()
    save_tensors(truth, tmp_path, lambda tensors: {key: item.float() for key, item in tensors.items()})
    assert torch.equal(logits_of(tmp_path), logits_of(truth))


def test_what_does_not_fit_is_named(networks, tmp_path):
    _, folder = networks("qwen3_5_text")

    def change(tensors):
        del tensors["model.layers.1.linear_attn.in_proj_z.weight"]
        tensors["model.layers.1.linear_attn.in_proj_y.weight"] = torch.zeros(2)
        tensors["model.layers.3.linear_attn.conv1d.weight"] = torch.zeros(5, 1, 4)
        return tensors

    with pytest.raises(CheckpointError) as error:
        load_folder(save_tensors(tmp_path, folder, change))
    message = str(error.value)
    assert "1 tensors missing:\n  model.layers.1.linear_attn.in_proj_z.weight [207, 96]" in message
    assert "of no use to the model:\n  model.layers.1.linear_attn.in_proj_y.weight [2]" in message
    assert "model.layers.3.linear_attn.conv1d.weight [5, 1, 4], expected [309, 1, 3]" in message


def test_an_interval_stands_for_a_list_of_layers():
    config = {key: item for key, item in tiny_qwen3_5.TEXT.items() if key != "layer_types"} | tiny_qwen3_5.DENSE
    model = FAMILIES["qwen3_5_text"].build({**config, "full_attention_interval": 2}, {})
    assert delta_layers(model) == [0, 2, 4]
    assert delta_layers(FAMILIES["qwen3_5_text"].build(config, {})) == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "expected linear_attention or full_attention for each of 5"),
        ({"layer_types": ["linear_attention"] * 5}, "has no full_attention"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types is"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5, expected a multiple of the 2 key heads"),
        ({"linear_num_key_heads": 0}, "expected a multiple of the 0 key heads, 1 or more of each"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, expected 1 or more"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim None"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ({"rope_parameters": 7}, "rope parameters are 7"),
    ],
)
def test_configs_that_cannot_be(change, words):
    config = {**tiny_qwen3_5.TEXT, **tiny_qwen3_5.DENSE, **change}
    with pytest.raises(UnsupportedConfig, match=words):
        FAMILIES["qwen3_5_text"].build(config, {})


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("text_config", {"rope_parameters": {"mrope_section": [9, 9, 9]}}, "mrope_section is .* expected a sum of 4"),
        ("vision_config", {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes is \[1\], expected none"),
    ],
)
def test_configs_with_eyes_that_cannot_be(networks, part, change, words):
    config = tiny.config_of(networks("qwen3_5")[1])
    config[part] = {**config[part], **change}
    with pytest.raises(UnsupportedConfig, match=words):
        FAMILIES["qwen3_5"].build(config, {})


def test_packed_weights_are_kept_on_disk(networks, tmp_path):
    """Taps, fp32 values and all come back from the cache as they were packed."""
    from tilewright.weights.checkpoint import open_checkpoint
    from tilewright.weights.load import load

    checkpoint = open_checkpoint(networks("qwen3_5_moe_text")[1])
    results = []
    for _ in range(2):
        model = family_of(checkpoint.config).build(checkpoint.config, checkpoint.shapes)
        options = {"dtype": torch.bfloat16, "rename": model.checkpoint_name, "cache_dir": tmp_path}
        results.append((load(model, checkpoint, **options).from_cache, Hands(model, torch.bfloat16).run(PROMPT.inputs)))
    assert [from_cache for from_cache, _ in results] == [False, True]
    assert torch.equal(results[0][1], results[1][1])
