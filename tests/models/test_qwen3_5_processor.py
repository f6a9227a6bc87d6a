"""Qwen3.5's prompts are those of transformers' processor: ids, positions, grids; and thoughts are told from answers."""

import json

import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import DATA, write_qwen3_vl_folder
from test_qwen3_vl_processor import CHATS, IMAGE, VIDEO, check_spans, oracle, oracle_text, parts_of  # noqa: F401
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from tilewright.server.output import OutputParser
from tilewright.server.output.parser import tool_syntax_of

ANSWER = "The sky.\n</think>\n\nBlue."


@pytest.fixture(scope="module", name="transformers")
def transformers_module():
    return transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Qwen3.5's template and config, with Qwen3's vocabulary, which is a sixth the size, and its ids of specials."""
    folder = write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen3_5"))
    config = json.loads((DATA / "qwen3_5_configs.json").read_text())["0.8B"]
    vl = json.loads((folder / "config.json").read_text())
    config |= {key: item for key, item in vl.items() if key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((DATA / "qwen3_5.jinja").read_text())
    return folder


def positions_of(config, ids, image_grids, video_grids):
    model = Qwen3_5Model.__new__(Qwen3_5Model)
    torch.nn.Module.__init__(model)
    model.config = transformers.Qwen3_5Config(**config)
    ids = torch.tensor([ids])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    grids = [torch.tensor(grid) if grid else None for grid in (image_grids, video_grids)]
    positions, delta = model.get_rope_index(
        input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grids[0], video_grid_thw=grids[1]
    )
    return positions[:, 0].numpy(), int(delta) + ids.shape[1]


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_that_of_transformers(name, thinks, processor, oracle, config):  # noqa: F811
    parts, bare, pictures, videos = parts_of(CHATS[name])
    messages = [{"role": "system", "content": "Be brief."}]
    inputs = processor.chat([*messages, {"role": "user", "content": parts}], enable_thinking=thinks)
    text = oracle.tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": bare}],
        chat_template=processor.template.sources["default"],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=thinks,
    )
    text, features, video_grids = oracle_text(oracle, text, pictures, videos)
    assert list(inputs.token_ids) == oracle.tokenizer.encode(text, add_special_tokens=False)
    image_grids = features["image_grid_thw"].tolist() if pictures else []
    assert [list(medium.grid) for medium in inputs.media if medium.kind == "image"] == image_grids
    assert [list(medium.grid) for medium in inputs.media if medium.kind == "video"] == video_grids
    positions, next_position = positions_of(config, inputs.token_ids, image_grids, video_grids)
    assert np.array_equal(inputs.positions, positions) and inputs.next_position == next_position
    assert inputs.opens_reasoning is thinks
    check_spans(inputs)


def split(processor, text, **template_args):
    """(thoughts, answer) of what the model says after a prompt, character by character as in a stream."""
    inputs = processor.chat([{"role": "user", "content": "Which colour is the sky?"}], **template_args)
    source = processor.template.sources["default"]
    parser = OutputParser(
        tool_syntax=tool_syntax_of(source), tools=[], opens_reasoning=inputs.opens_reasoning, splits_reasoning=True
    )
    pieces = [piece for character in text for piece in parser.push(character)] + parser.finish()
    return "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces)


def test_thoughts_begin_in_the_prompt(processor):
    """The template opens them unless told not to; a model that closes them at once has none."""
    assert split(processor, ANSWER) == split(processor, ANSWER, enable_thinking=True) == ("The sky.", "Blue.")
    assert split(processor, "\n</think>\n\nBlue.") == ("", "Blue.")
    assert split(processor, "The sky, still") == ("The sky, still", "")


def test_no_thoughts_when_told_so(processor):
    """The template closes them in the prompt: all that is said is the answer."""
    assert split(processor, "Blue.", enable_thinking=False) == ("", "Blue.")
    assert split(processor, "a </think> b", enable_thinking=False) == ("", "a </think> b")


def test_earlier_thoughts_are_not_told_again(processor):
    """Only those of the turn under way stay: the template's rule, with thoughts as the server hands them out."""
    messages = [
        {"role": "user", "content": "Which colour is the sky?"},
        {"role": "assistant", "content": "Blue.", "reasoning_content": "The sky."},
        {"role": "user", "content": "And grass?"},
    ]
    text = processor.tokenizer.decode(processor.chat(messages).token_ids, skip_special_tokens=False)
    assert "The sky." not in text and "Blue." in text and text.endswith("<|im_start|>assistant\n<think>\n")
