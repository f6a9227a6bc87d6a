"""Llama-3.2-Vision's inputs are those of transformers' processor: ids, tiles, masks and pixels exactly."""

import json

import numpy as np
import pytest
import tiny_checkpoint
import torch
from fuzzing import num_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from media_parts import parts, patches_of
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)
from transformers.models.mllama.processing_mllama import MllamaProcessor as Oracle

from tilewright.engine.kv.cross import cross_groups_of
from tilewright.inputs.media import MediaLimits
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.mllama.processor import MllamaPreprocessing, MllamaProcessor, fit, read_preprocessing
from tilewright.types import RequestError

ROWS = 17  # of a tile: 16 patches and the class token


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.write_cross_model(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="module")
def oracle(folder):
    template = (folder / "chat_template.jinja").read_text()
    image_processor = MllamaImageProcessorPil.from_pretrained(folder)
    return Oracle(image_processor, AutoTokenizer.from_pretrained(folder), chat_template=template)


def picture(height, width, seed=0):
    pixels = np.random.default_rng(seed + height + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


PICTURES = [picture(16, 16), picture(40, 30), picture(10, 60), picture(100, 12), picture(7, 5)]


def messages(*contents):
    """Of user and assistant in turn; numbers are pictures."""
    return [
        {
            "role": ("user", "assistant")[index % 2],
            "content": [
                {"type": "image", "image": PICTURES[part]} if isinstance(part, int) else {"type": "text", "text": part}
                for part in content
            ],
        }
        for index, content in enumerate(contents)
    ]


CHATS = [
    [("What is a tile?",)],
    [(0, "What is it?")],
    [("Look: ", 1, 2, "And?"), ("Two.",), (3, 4, 0, "And now?")],
    [(2, "a", 3, "b", 3)],
]


def pictures_of(chat):
    return [PICTURES[part] for content in chat for part in content if isinstance(part, int)]


def seen_tiles(inputs, max_tiles=4):
    """What each token sees, as transformers writes it: [T, pictures, tiles]."""
    mask = np.zeros((len(inputs.token_ids), len(inputs.media), max_tiles), np.int64)
    for group in cross_groups_of(inputs.media):
        for cross_span in group.cross_spans(0, len(inputs.token_ids)):
            num_states = 0
            for medium in group.media:
                num_states += medium.num_states
                if num_states <= cross_span.num_states:
                    mask[
                        cross_span.start : cross_span.stop, inputs.media.index(medium), : medium.num_states // ROWS
                    ] = 1
    return mask


def check(processor, inputs, expected, num_pictures):
    assert list(inputs.token_ids) == expected["input_ids"][0]
    assert np.array_equal(inputs.positions, np.arange(len(inputs.token_ids))[None])
    assert inputs.next_position == len(inputs.token_ids) and len(inputs.media) == num_pictures
    if not num_pictures:
        return
    assert np.array_equal(seen_tiles(inputs), expected["cross_attention_mask"][0])
    tilings = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]
    for index, medium in enumerate(inputs.media):
        num_tiles = medium.num_states // ROWS
        assert medium.tiling == tilings[expected["aspect_ratio_ids"][0, index] - 1]
        assert expected["aspect_ratio_mask"][0, index].tolist() == [1] * num_tiles + [0] * (4 - num_tiles)
        tiles = torch.from_numpy(expected["pixel_values"][0, index, :num_tiles])
        patches = tiles.view(num_tiles, 3, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(num_tiles * 16, 48)
        # Pillow before 13 resizes in another order, at most a level apart.
        atol = 0 if int(Image.__version__.split(".")[0]) >= 13 else 1 / 255 / 0.3 + 1e-6
        torch.testing.assert_close(patches_of(processor, medium), patches, rtol=0, atol=atol)


@pytest.mark.parametrize("chat", CHATS)
def test_chats_are_those_of_transformers(processor, oracle, chat):
    conversation = messages(*chat)
    text = oracle.apply_chat_template(
        [
            {"role": m["role"], "content": [{k: v for k, v in part.items() if k != "image"} for part in m["content"]]}
            for m in conversation
        ],
        add_generation_prompt=True,
    )
    pictures = pictures_of(chat)
    expected = oracle(images=pictures or None, text=text, add_special_tokens=False)
    check(processor, processor.chat(conversation), expected, len(pictures))


@pytest.mark.parametrize(
    "text", ["hello", "<|image|>hello", "<|image|><|image|>two", "see <|image|> there", "<|begin_of_text|>a<|image|>b"]
)
def test_prompts_are_those_of_transformers(processor, oracle, text):
    """But for the second beginning-of-text that its tokenizer puts before what its processor has begun."""
    pictures = PICTURES[: text.count("<|image|>")]
    expected = oracle(images=pictures or None, text=text, add_special_tokens=False)
    check(processor, processor.prompt(text, media=parts(pictures)), expected, len(pictures))
    ids = processor.prompt(token_ids=expected["input_ids"][0], media=parts(pictures))
    check(processor, ids, expected, len(pictures))


def _see_through():
    pixels = np.random.default_rng(5).integers(0, 256, (30, 20, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA")


@pytest.mark.parametrize(
    "odd",
    [
        picture(1, 1),
        picture(300, 1),
        picture(1, 300),
        picture(33, 32),
        _see_through(),
        picture(20, 30).convert("L"),
        picture(20, 30).convert("P"),
        _see_through().convert("LA"),
    ],
    ids=["1x1", "tall", "wide", "a pixel more", "see-through", "grey", "palette", "grey see-through"],
)
def test_odd_pictures_are_those_of_transformers(processor, oracle, odd):
    expected = oracle(images=[odd], text="<|image|>x", add_special_tokens=False)
    check(processor, processor.prompt("<|image|>x", media=parts([odd])), expected, 1)


@settings(max_examples=num_cases(200), deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([16, 448, 560]), st.integers(1, 7))
def test_the_tiles_chosen_are_those_of_transformers(height, width, tile, max_tiles):
    ours = fit(height, width, MllamaPreprocessing(tile, 14, max_tiles, (), (), 1.0, "bilinear"))
    canvas = get_optimal_tiled_canvas(height, width, max_tiles, tile)
    assert (ours.tiling[0] * tile, ours.tiling[1] * tile) == tuple(canvas)
    assert (ours.height, ours.width) == tuple(get_image_size_fit_to_canvas(height, width, *canvas, tile))


def test_the_key_goes_by_content_and_size(processor):
    ways = [PICTURES[1], np.array(PICTURES[1])]
    keys = {processor.prompt("<|image|>", media=parts([way])).media[0].key for way in ways}
    assert len(keys) == 1
    assert processor.prompt("<|image|>", media=parts([PICTURES[2]])).media[0].key not in keys


def test_a_known_picture_is_not_decoded(processor, monkeypatch):
    made = []
    monkeypatch.setattr(
        MllamaProcessor, "_canvas", lambda self, pixels, fitted: made.append(fitted) or torch.zeros(16, 16, 3).byte()
    )
    inputs = processor.prompt("<|image|>", media=parts([PICTURES[0]]), is_known=lambda key: True)
    assert not made
    assert patches_of(processor, inputs.media[0]).shape == (16, 48) and len(made) == 1
    processor.prompt("<|image|>", media=parts([PICTURES[0]]), is_known=lambda key: False)
    assert len(made) == 2


def test_placeholders_in_the_text_of_a_message_are_text(processor):
    inputs = processor.chat(messages(["<|image|>", 0, "What is <|image|>?"]))
    assert inputs.token_ids.count(processor.image_token_id) == len(inputs.media) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": "<|image|>"}, "the prompt has 1 placeholders of images, expected 0"),
        ({"text": "<|image|>", "media": parts(PICTURES[:2])}, "image 2: the prompt has no placeholder left for it"),
        ({"text": "x", "media": parts(videos=[b"clip"])}, "video 1: the model accepts text and image"),
        ({"text": "x", "token_ids": [1]}, "either a text or token ids"),
        ({}, "either a text or token ids"),
        ({"token_ids": [-3]}, "token id -3"),
        ({"text": "<|image|>", "media": parts([b"not a picture"])}, "image 1"),
    ],
)
def test_mistakes_are_named(processor, arguments, words):
    with pytest.raises(RequestError, match=words):
        processor.prompt(**arguments)


def test_limits_hold(folder, config):
    tokenizer = Tokenizer.from_folder(folder)
    strict = MllamaProcessor(config, folder, tokenizer, None, MediaLimits(max_pixels=500))
    with pytest.raises(RequestError, match="image 1"):
        strict.prompt("<|image|>", media=parts([PICTURES[1]]))
    with pytest.raises(RequestError, match="no chat template"):
        strict.chat(messages(("hi",)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": {"height": 20, "width": 16}}, "size.height 20"),
        ({"max_image_tiles": 6}, "max_image_tiles 6"),
        ({"do_resize": False}, "do_resize false"),
        ({"do_pad": False}, "do_pad false"),
        ({"resample": 1}, "resample 1"),
    ],
)
def test_settings_that_cannot_be(folder, config, tmp_path, change, words):
    stored = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, **change}))
    with pytest.raises(ValueError, match=words):
        read_preprocessing(config, tmp_path)


def test_settings_without_a_file(config):
    settings = read_preprocessing(config, None)
    assert (settings.tile_size, settings.patch_size, settings.max_tiles, settings.filter) == (16, 4, 4, "bilinear")
    assert settings.mean == (0.48145466, 0.4578275, 0.40821073)
