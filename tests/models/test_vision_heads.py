"""The width of a vision tower's heads: as its config says, or the heads' share of the tower's width."""

import copy
import json

import pytest
import tiny
import tiny_qwen3_5
import torch
from hand_batches import Hands
from test_mllama import load_folder, save_tensors
from test_parity import expected, logits_of, relative
from torch import nn

from tilewright.types import UnsupportedConfig

NUM_HEADS = {"qwen3_vl": "num_heads", "qwen3_5": "num_heads", "mllama": "attention_heads"}
TOLERANCE = {"qwen3_vl": 1e-4, "qwen3_5": 1e-3, "mllama": 1e-4}  # of recurrent layers: test_qwen3_5.py says why


@pytest.fixture
def difference(make_runner):
    """How far the checkpoint in a folder is from transformers' network, for a prompt with a picture."""

    def of(name, folder, network):
        if name == "mllama":
            prompt = tiny.cross_prompt([5, (1, 2), 7], 1)
        else:
            prompt = tiny.media_prompt(network, [("image", (1, 6, 8))], 1)
        model = load_folder(folder)
        if name == "qwen3_5":  # it has states, which the plain runner has no cache for
            ours = Hands(model).run(prompt.inputs)
        else:
            (ours,) = logits_of(make_runner(model), [prompt])
        return relative(ours, expected(network, prompt))

    return of


def with_heads(name, num_heads, head_width):
    """transformers' network with such heads in its tower. Its config cannot ask for them, its modules can."""
    config = copy.deepcopy((tiny_qwen3_5 if name == "qwen3_5" else tiny).CONFIGS[name])
    vision = config.vision_config
    vision.head_dim = head_width  # read for the rotary table of Qwen's towers alone
    network = tiny_qwen3_5.make_network(name, config) if name == "qwen3_5" else tiny.network_of(config)
    setattr(vision, NUM_HEADS[name], num_heads)
    width, attended = vision.hidden_size, num_heads * head_width
    torch.manual_seed(1)
    for module in network.modules():
        if not type(module).__name__.endswith("VisionAttention"):
            continue
        module.num_heads, module.head_dim, module.scaling = num_heads, head_width, head_width**-0.5
        if hasattr(module, "qkv"):
            module.qkv, module.proj = nn.Linear(width, 3 * attended), nn.Linear(attended, width)
        else:
            for projection in ("q_proj", "k_proj", "v_proj"):
                setattr(module, projection, nn.Linear(width, attended, bias=False))
            module.o_proj = nn.Linear(attended, width, bias=False)
    return network


def with_vision(folder, source, **changes):
    """The checkpoint of `source` in `folder`, with these entries in its vision_config."""
    save_tensors(folder, source, dict)
    config = tiny.config_of(folder)
    config["vision_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", NUM_HEADS)
@pytest.mark.parametrize("head_dim", [None, 24], ids=["null", "the share"])
def test_null_is_the_share_of_the_width(networks, difference, tmp_path, name, head_dim):
    network, folder = networks(name)
    assert difference(name, with_vision(tmp_path, folder, head_dim=head_dim), network) < TOLERANCE[name]


@pytest.mark.parametrize("name", NUM_HEADS)
@pytest.mark.parametrize(("num_heads", "head_width"), [(3, 32), (3, 16), (5, 24)])
def test_heads_of_a_width_of_their_own(difference, tmp_path, name, num_heads, head_width):
    """Wider or narrower than a third of 72, or of a number that does not divide it."""
    network = with_heads(name, num_heads, head_width)
    folder = tiny.save(network, tmp_path)
    assert tiny.config_of(folder)["vision_config"]["head_dim"] == head_width
    assert difference(name, folder, network) < TOLERANCE[name]


@pytest.mark.parametrize("name", NUM_HEADS)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "message"),
    [
        (5, None, "5 heads, expected a divisor of its width, 72"),
        (0, None, "0 heads, expected 1 or more"),
        (0, 24, "0 heads, expected 1 or more"),
        (3, 0, "head_dim 0, expected 1 or more"),
        (3, "24", "head_dim '24', expected a whole number"),
    ],
)
def test_heads_that_cannot_be(networks, tmp_path, name, num_heads, head_dim, message):
    _, folder = networks(name)
    changed = with_vision(tmp_path, folder, **{NUM_HEADS[name]: num_heads, "head_dim": head_dim})
    with pytest.raises(UnsupportedConfig, match=message):
        load_folder(changed)
