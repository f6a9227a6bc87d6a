"""Qwen2.5-VL as a text encoder that sees: its tower and its hidden states against transformers'."""

import pytest
import torch
import transformers
from components import loaded, loaded_on_ranks, randomized, relative, rms
from oracle import require

from tilewright.models import qwen2_5_vl
from tilewright.models.qwen2_5_vl import image_positions
from tilewright.types import UnsupportedConfig

PICTURE, START, END = 140, 141, 142
GRIDS = [(12, 8), (4, 14)]  # windows of 4 x 4 patches: whole ones, and some that the edges cut
TEXT = {
    "vocab_size": 150,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 40,
    "out_hidden_size": 48,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=PICTURE,
        video_token_id=143,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = randomized(transformers.Qwen2_5_VLForConditionalGeneration(config))
    folder = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder)
    return model, folder


def patches_of(grids=GRIDS):
    """As stills have them: one frame."""
    count = sum(rows * columns for rows, columns in grids)
    return torch.randn(count, 3 * 4 * 4, generator=torch.Generator().manual_seed(1))


def as_frames(patches):
    """The same as transformers reads them: the frame twice."""
    return patches.view(-1, 3, 1, 16).expand(-1, -1, 2, -1).reshape(len(patches), -1)


def prompt(grids=GRIDS):
    ids = [5, 6]
    for rows, columns in grids:
        ids += [START, *[PICTURE] * (rows * columns // 4), END, 7, 8, 9]
    return ids


def theirs(model, grids=GRIDS, dtype=torch.float32):
    grid = torch.tensor([(1, *one) for one in grids])
    ids = torch.tensor([prompt(grids)])
    types = (ids == PICTURE).int()
    with torch.no_grad():
        output = model(
            ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=as_frames(patches_of(grids)).to(dtype),
            image_grid_thw=grid,
            mm_token_type_ids=types,
            output_hidden_states=True,
        )
    return output.hidden_states[-1][0]


@pytest.mark.parametrize("grids", [GRIDS, [(2, 2)], [(6, 6)]], ids=str)
def test_features_are_those_of_transformers(pair, grids):
    model, folder = pair
    grid = torch.tensor([(1, *one) for one in grids])
    with torch.no_grad():
        expected = model.model.visual(as_frames(patches_of(grids)), grid_thw=grid).pooler_output
    tower = loaded(qwen2_5_vl.build, folder).vision
    assert relative(tower(patches_of(grids), grids), expected) < 1e-4


def test_hidden_states_are_those_of_transformers(pair):
    model, folder = pair
    encoder = loaded(qwen2_5_vl.build, folder)
    assert relative(encoder.encode_seeing(prompt(), patches_of(), GRIDS), theirs(model)) < 1e-4


def test_text_alone_is_read_as_without_a_tower(pair):
    model, folder = pair
    (found,) = loaded(qwen2_5_vl.build, folder).encode([[5, 6, 7]])
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states[-1][0]
    assert relative(found, expected) < 1e-4


def test_bf16_is_as_close_as_transformers_is(pair):
    model, folder = pair
    truth = theirs(model)
    half = require("copy").deepcopy(model).to(torch.bfloat16)
    found = loaded(qwen2_5_vl.build, folder, torch.bfloat16).encode_seeing(prompt(), patches_of(), GRIDS)
    assert rms(found.float() - truth) <= 1.25 * rms(theirs(half, dtype=torch.bfloat16).float() - truth)


def test_two_ranks_give_what_one_does(pair):
    _, folder = pair
    alone = loaded(qwen2_5_vl.build, folder).encode_seeing(prompt(), patches_of(), GRIDS)
    compute = lambda encoder: encoder.encode_seeing(prompt(), patches_of(), GRIDS)  # noqa: E731
    for found in loaded_on_ranks(2, qwen2_5_vl.build, folder, compute):
        assert relative(found, alone) < 1e-4


def test_positions_go_on_behind_the_longer_side_of_a_picture():
    ids = [1, PICTURE, PICTURE, PICTURE, PICTURE, PICTURE, PICTURE, 2]
    times, rows, columns = image_positions(ids, PICTURE, [(2, 3)]).tolist()
    assert times == [0, 1, 1, 1, 1, 1, 1, 4]
    assert rows == [0, 1, 1, 1, 2, 2, 2, 4]
    assert columns == [0, 1, 2, 3, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3', expected qwen2_5_vl"),
        ({"vision_config": None}, "with a vision_config"),
        ({"vision_config": {**VISION, "window_size": 7}}, "window_size 7, expected 8 or more"),
        ({"vision_config": {**VISION, "fullatt_block_indexes": 3}}, "fullatt_block_indexes 3, expected a list"),
        ({"vision_config": {**VISION, "out_hidden_size": 40}}, "out_hidden_size 40, expected 48"),
    ],
)
def test_configs_that_do_not_fit(change, message):
    config = {"model_type": "qwen2_5_vl", "text_config": TEXT, "vision_config": VISION, **change}
    with pytest.raises(UnsupportedConfig, match=message):
        qwen2_5_vl.build(config)
