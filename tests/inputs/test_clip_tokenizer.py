"""CLIP's tokenizer from vocab.json and merges.txt, and T5's from tokenizer.json, against transformers."""

import json

import pytest
import tiny_flux

from tilewright.host.files import CheckpointError
from tilewright.inputs.tokenizer import Tokenizer

TEXTS = [
    "a red cat",
    "Red  CATS,\n\tdon't they're 1234 5!!",
    "Ünïcode, 漢字 and 🐈 cat's",
    "cafe\u0301 <|endoftext|> after",
    "",
    "   ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As FLUX.1 publishes it."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = tiny_flux.clip_tokenizer()
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    merges = [" ".join(pair) for pair in tokenizer._merges]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **names}))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(text, folder):
    ours = Tokenizer.from_folder(folder).encode(text, add_special_tokens=True)
    assert ours == tiny_flux.clip_tokenizer()(text).input_ids


def test_words_that_merge_are_one_token(folder):
    tokenizer = Tokenizer.from_folder(folder)
    start, red, cat, end = tokenizer.encode("Red cat", add_special_tokens=True)
    assert [tokenizer.token_id(token) for token in ("<|startoftext|>", "red</w>", "cat</w>", "<|endoftext|>")] == [
        start,
        red,
        cat,
        end,
    ]
    assert tokenizer.encode("Red cat") == [red, cat]


def test_tokenizer_json_comes_first(folder, tmp_path):
    tiny_flux.clip_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    for text in TEXTS:
        ours = Tokenizer.from_folder(tmp_path).encode(text, add_special_tokens=True)
        assert ours == Tokenizer.from_folder(folder).encode(text, add_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_t5_ids_are_those_of_transformers(text, tmp_path):
    tokenizer = tiny_flux.t5_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode(text, add_special_tokens=True) == tokenizer(text).input_ids
    assert ours.token_id(ours.special_tokens["pad_token"]) == tokenizer.pad_token_id


def copied(folder, target):
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_files_that_do_not_fit(folder, tmp_path):
    broken = copied(folder, tmp_path)
    (broken / "merges.txt").write_text("#version: 0.2\nno such pair here\n")
    with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt cannot be read"):
        Tokenizer.from_folder(broken)
    copied(folder, broken)
    (broken / "vocab.json").write_text('{"a": 0}')
    (broken / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CheckpointError, match=r"lacks the token '<\|startoftext\|>'"):
        Tokenizer.from_folder(broken)
    (broken / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(broken)
