"""Llama-3.2-Vision against transformers where the runner of all families does not look: tower, names, biases, masks."""

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_parity import expected, logits_of, prompts_for, relative, rms
from torch_bf16 import quick_products

from tilewright.models.mllama.model import FAMILIES, model_name
from tilewright.models.mllama.vision import TileRows, arrangements
from tilewright.models.registry import family_of
from tilewright.types import UnsupportedConfig
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load
from tilewright.weights.spec import iter_weights

PROMPT = tiny.cross_prompt([(1, 2), 6, (2, 2), (1, 1), 9], 7)


def load_folder(folder, dtype=torch.float32):
    checkpoint = open_checkpoint(folder)
    model = family_of(checkpoint.config).build(checkpoint.config, checkpoint.shapes)
    load(model, checkpoint, dtype=dtype, rename=model.checkpoint_name)
    return model


def save_tensors(folder, source, change):
    """The checkpoint of `source` in `folder`, its tensors changed."""
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


@torch.no_grad()
@quick_products()
def states_of(hf, prompt, **changed):
    """transformers' encoder states of a prompt's pictures, [pictures, tiles, rows, width]."""
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    arguments = {**{name: prompt.arguments[name] for name in names}, **changed}
    return hf.model.multi_modal_projector(hf.model.vision_model(**arguments).last_hidden_state)[0]


@pytest.mark.parametrize("tiling", arrangements(4))
def test_states_are_those_of_transformers(networks, models, each_backend, tiling):
    """Padding is seen by the picture and the other way round, but not by padding; at every arrangement of tiles."""
    hf, _ = networks("mllama")
    prompt = tiny.cross_prompt([tiling], 11)
    (states,) = tiny.encode(models("mllama", torch.float32), prompt.inputs, torch.float32)
    num_tiles = tiling[0] * tiling[1]
    wanted = states_of(hf, prompt)[0, :num_tiles].flatten(0, 1)
    assert states.shape == wanted.shape and relative(states, wanted) < 1e-4
    everything_seen = torch.ones_like(prompt.arguments["aspect_ratio_mask"])
    if num_tiles < 4:  # the mask is worth testing: without it the states are others
        unmasked = states_of(hf, prompt, aspect_ratio_mask=everything_seen)[0, :num_tiles].flatten(0, 1)
        assert relative(unmasked, wanted) > 1e-2


def test_bf16_states_are_as_close_to_the_truth_as_transformers(networks, models):
    hf, folder = networks("mllama")
    half = type(hf).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours, theirs = [], []
    for tiling in arrangements(4):
        prompt = tiny.cross_prompt([tiling], 11)
        truth = states_of(hf, prompt)[0, : tiling[0] * tiling[1]].flatten(0, 1)
        (states,) = tiny.encode(models("mllama", torch.bfloat16), prompt.inputs, torch.bfloat16)
        pixels = prompt.arguments["pixel_values"].bfloat16()
        ours.append((states.float() - truth).square().mean())
        theirs.append(
            (states_of(half, prompt, pixel_values=pixels)[0].flatten(0, 1)[: len(truth)].float() - truth)
            .square()
            .mean()
        )
    assert sum(ours).sqrt() <= 1.25 * sum(theirs).sqrt()


def test_a_checkpoint_in_bf16_loses_nothing_by_gates_in_its_weights(networks, make_runner, tmp_path):
    """Released ones are in bf16. Multiplied by a gate a weight is rounded once more, its product once or twice less."""
    hf, folder = networks("mllama")
    stored = {name: tensor.bfloat16() for name, tensor in hf.state_dict().items()}
    save_tensors(tmp_path, folder, lambda tensors: stored)
    exact, half = type(hf)(hf.config).eval(), type(hf)(hf.config).to(torch.bfloat16).eval()
    for network in (exact, half):
        network.load_state_dict(stored)
    model = load_folder(tmp_path, torch.bfloat16)
    ours, theirs = [], []
    for prompt in prompts_for("mllama", hf):
        truth = expected(exact, prompt)
        (logits,) = logits_of(make_runner(model, dtype=torch.bfloat16), [prompt], dtype=torch.bfloat16)
        ours.append(logits - truth)
        theirs.append(expected(half, prompt, torch.bfloat16) - truth)
    assert rms(torch.cat(ours)) <= 1.25 * rms(torch.cat(theirs))


@pytest.mark.parametrize("num_tiles", [1, 3, 4])
def test_rows_are_laid_out_once_each(num_tiles):
    rows = TileRows(num_tiles, 4, 17)
    parts = [part for tile in range(4) for part in (rows.filled(tile), rows.filling(tile))]
    assert sorted(row for part in parts for row in range(part.start, part.stop)) == list(range(rows.total))
    assert rows.total == 96 and all(rows.filled(tile).stop <= rows.num_real for tile in range(num_tiles))


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
def test_a_mixed_batch_in_chunks(networks, models, make_runner, each_backend, chunk_size):
    hf, _ = networks("mllama")
    prompts = prompts_for("mllama", hf)
    runner = make_runner(models("mllama", torch.float32))
    for ours, prompt in zip(logits_of(runner, prompts, chunk_size), prompts, strict=True):
        assert relative(ours, expected(hf, prompt)) < 1e-4


@torch.no_grad()
def test_where_every_token_sees_a_picture_transformers_needs_no_correction(networks, models, make_runner, each_backend):
    hf, _ = networks("mllama")
    (ours,) = logits_of(make_runner(models("mllama", torch.float32)), [PROMPT])
    assert relative(ours, hf(**PROMPT.arguments).logits[0]) < 1e-4


@torch.no_grad()
def test_text_alone_is_text_without_cross_attention(networks, models, make_runner):
    """transformers leaves the layers out; so do we, also in a batch with pictures (test_parity), bit for bit."""
    hf, _ = networks("mllama")
    text, beside = tiny.cross_prompt([30], 8), tiny.cross_prompt([(1, 3), 30], 9)
    (alone,) = logits_of(make_runner(models("mllama", torch.float32)), [text])
    assert relative(alone, hf(**text.arguments).logits[0]) < 1e-4
    together, _ = logits_of(make_runner(models("mllama", torch.float32)), [text, beside])
    assert torch.equal(together, alone)


def test_what_a_config_leaves_out_is_as_transformers_has_it(networks):
    config = open_checkpoint(networks("mllama")[1]).config
    left_out = ("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters")
    text = {key: value for key, value in config["text_config"].items() if key not in left_out}
    model = family_of(config).build({**config, "text_config": text}, {})
    wanted = transformers.models.mllama.MllamaTextConfig()
    assert model.decoder.config.norm.eps == wanted.rms_norm_eps
    assert model.decoder.ropes.ropes[0].config.theta == wanted.rope_parameters["rope_theta"]


@torch.no_grad()
def test_a_bias_that_a_checkpoint_lacks_is_zero(networks, make_runner, tmp_path):
    hf, folder = networks("mllama")

    def is_dropped(name):
        return name.endswith(".bias")  # of linears, norms and the projector: nothing else has one

    assert {name.split(".")[-2] for name in hf.state_dict() if is_dropped(name)} >= {
        "fc1", "layernorm_pre", "layernorm_post", "input_layernorm", "multi_modal_projector"
    }  # fmt: skip
    save_tensors(tmp_path, folder, lambda tensors: {k: v for k, v in tensors.items() if not is_dropped(k)})
    without = type(hf)(hf.config).eval()
    without.load_state_dict({k: torch.zeros_like(v) if is_dropped(k) else v for k, v in hf.state_dict().items()})
    wanted = without(**PROMPT.arguments).logits[0]
    assert relative(hf(**PROMPT.arguments).logits[0], wanted) > 1e-2
    (ours,) = logits_of(make_runner(load_folder(tmp_path)), [PROMPT])
    assert relative(ours, wanted) < 1e-4


def test_either_way_of_naming_tensors(networks, models, make_runner, tmp_path):
    """transformers saves them as they were released, and calls them otherwise itself."""
    hf, folder = networks("mllama")
    save_tensors(tmp_path, folder, lambda tensors: {name: tensor.clone() for name, tensor in hf.state_dict().items()})
    names = [set(open_checkpoint(path).shapes) for path in (folder, tmp_path)]
    assert not names[0] & names[1]
    (ours,) = logits_of(make_runner(load_folder(tmp_path)), [PROMPT])
    (wanted,) = logits_of(make_runner(models("mllama", torch.float32)), [PROMPT])
    assert torch.equal(ours, wanted)


def test_the_real_model_has_exactly_our_weights():
    """Every name and shape of the 11B model, from transformers' own sizes, without memory for it."""
    config = transformers.MllamaConfig(vision_config={"image_size": 560})
    with torch.device("meta"):
        theirs = {
            k: tuple(v.shape) for k, v in transformers.MllamaForConditionalGeneration(config).state_dict().items()
        }
    model = FAMILIES["mllama"].build(config.to_dict(), theirs)
    ours = {source.name: source.shape for weight in iter_weights(model) for source in weight.sources}
    assert ours == {model_name(name): shape for name, shape in theirs.items()}
    assert model.kv_spec.num_layers == 32 and model.cross_spec.num_layers == 8
    assert model.cross_spec.max_states == 6404


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("text_config", {"cross_attention_layers": [1, 9]}, "cross_attention_layers"),
        ("text_config", {"cross_attention_layers": []}, "cross_attention_layers"),
        ("text_config", {"cross_attention_layers": None}, "cross_attention_layers"),
        ("vision_config", {"vision_output_dim": 100}, "vision_output_dim 100, expected 216"),
        ("vision_config", {"intermediate_layers_indices": [0, 3]}, "intermediate_layers_indices"),
    ],
)
def test_configs_that_cannot_be(networks, part, change, words):
    config = tiny.config_of(networks("mllama")[1])
    config[part] = {**config[part], **change}
    with pytest.raises(UnsupportedConfig, match=words):
        FAMILIES["mllama"].build(config, {})
