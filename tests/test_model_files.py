"""Files that are not what their names say: each error names the file, what it is and what to do."""

import json

import pytest
import torch
from checkpoint_files import DATA, write_qwen3_vl_folder
from safetensors.torch import save_file

from tilewright.engine.load.loading import sampling_defaults
from tilewright.host.files import CheckpointError
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.registry import FAMILIES
from tilewright.weights.checkpoint import open_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><body>404 Not Found</body></html>"
ZIP = b"PK\x03\x04" + bytes(60)
WRONG = [
    (POINTER, "is a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (PAGE, "is an HTML page, probably of a failed or refused download"),
    (ZIP, "is a ZIP archive, such as pickled PyTorch weights"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "test"}))
    save_file({"t": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen")))


@pytest.mark.parametrize("data, message", WRONG)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_what_stands_in_for_a_file_is_named(folder, name, data, message):
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"/{name} {message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("data, message", WRONG)
def test_in_the_place_of_gguf_too(tmp_path, data, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"/model.gguf {message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "data, message",
    [*WRONG, (b"", "is empty: download it again"), (b'{"a": ', "is not JSON: Expecting"), (b"[]", "holds a list")],
)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json"]
)
def test_a_tokenizer_s_files(tmp_path, name, data, message):
    write_qwen3_vl_folder(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"/{name} {message}"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_of_another_kind(tmp_path):
    write_qwen3_vl_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Hieroglyphs"}}')
    with pytest.raises(CheckpointError, match=r"/tokenizer\.json cannot be read as a tokenizer: "):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("data, message", WRONG)
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "mllama"])
def test_a_processor_s_files(tmp_path, tokenizer, model_type, name, data, message):
    (tmp_path / name).write_bytes(data)
    config = json.loads((DATA / "qwen3_vl_2b_config.json").read_text())
    make = FAMILIES[model_type].make_processor
    with pytest.raises(CheckpointError, match=f"/{name} {message}"):
        make(config, tmp_path, tokenizer, None, dtype=torch.float32, opener=None)


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "generation_config.json").write_bytes(b'\xef\xbb\xbf{"temperature": 0.5}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.5}


@pytest.mark.parametrize(
    "stored, expected",
    [
        ({"top_k": -1, "temperature": 0.7}, {"top_k": 0, "temperature": 0.7}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": None, "top_p": 0.9}, {"top_p": 0.9}),
        ({"do_sample": False, "top_k": -1}, {"temperature": 0.0}),
    ],
)
def test_recommended_sampling(tmp_path, stored, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize("name, value", [("temperature", 7.0), ("top_p", "0.9"), ("top_k", -5), ("top_k", [1])])
def test_sampling_that_no_request_could_ask_for_is_left_out(tmp_path, caplog, name, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value, "min_p": 0.1}))
    assert sampling_defaults(tmp_path) == {"min_p": 0.1}
    assert f"{name} of generation_config.json is not used: " in caplog.text
