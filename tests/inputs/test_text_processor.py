import numpy as np
import pytest
from checkpoint_files import smollm2_metadata

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.processor import TextProcessor
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import RequestError


@pytest.fixture(scope="module")
def processor():
    tokenizer = Tokenizer.from_gguf(smollm2_metadata())
    return TextProcessor("SmolLM2", tokenizer, ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens))


def test_a_chat(processor):
    inputs = processor.chat([{"role": "user", "content": "Hello"}])
    text = processor.tokenizer.decode(inputs.token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert np.array_equal(inputs.positions, [np.arange(len(inputs.token_ids))])
    assert inputs.positions.dtype == np.int64 and inputs.next_position == len(inputs.token_ids)
    assert inputs.media == ()


def test_parts_of_text_are_one_text(processor):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert (
        processor.chat([{"role": "user", "content": parts}]).token_ids
        == processor.chat([{"role": "user", "content": "Hello"}]).token_ids
    )


def test_prompts(processor):
    ids = processor.tokenizer.encode("Hello there")
    assert processor.prompt("Hello there").token_ids == processor.prompt(token_ids=ids).token_ids == tuple(ids)
    with pytest.raises(RequestError, match="either a text or token ids"):
        processor.prompt("a", [1])
    with pytest.raises(RequestError, match="token id -1, expected 0 or more"):
        processor.prompt(token_ids=[3, -1])


def test_media_are_refused_in_the_models_name(processor):
    for part in (
        {"type": "image", "image": b"x"},
        {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
    ):
        with pytest.raises(RequestError, match="image 1: SmolLM2 accepts text only"):
            processor.chat([{"role": "user", "content": [part]}])
    with pytest.raises(RequestError, match="video 1: SmolLM2 accepts text only"):
        processor.prompt("x", media=[{"type": "video", "video": b"x"}])
    with pytest.raises(RequestError, match="media has an item of text, expected"):
        processor.prompt("x", media=["cat.png"])
    with pytest.raises(RequestError, match="a part of a message is of type 'file', expected text"):
        processor.chat([{"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}])
    with pytest.raises(RequestError, match="SmolLM2 has no chat template"):
        TextProcessor("SmolLM2", processor.tokenizer, None).chat([{"role": "user", "content": "x"}])
