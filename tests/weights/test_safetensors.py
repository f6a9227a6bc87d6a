"""Folders of safetensors: what is read, and that no broken one is."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from tilewright.weights.checkpoint import CheckpointError, open_checkpoint

CONFIG = {"model_type": "test"}


def write_raw(path, header: object, data: bytes, header_bytes: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
    tensors = {str(dtype): torch.randn(7, 5, generator=generator).to(dtype) for dtype in dtypes}
    return tensors | {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "index": torch.arange(11)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def test_a_single_file(folder):
    tensors = some_tensors()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == CONFIG and checkpoint.files == folder
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert same(checkpoint.read(name), tensor), name
        assert checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.size_bytes(name) == tensor.numel() * tensor.element_size()
        if tensor.dim() == 2:
            end = min(6, len(tensor))
            assert same(checkpoint.rows(name, 2 if end else 0, end), tensor[2 if end else 0 : end]), name


def test_views_outlive_release_and_the_checkpoint(folder):
    weight = torch.randn(600, 300)
    save_file({"a": torch.randn(3, 3), "weight": weight, "b": torch.randn(3, 3)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    view = checkpoint.read("weight")
    checkpoint.release("weight")
    del checkpoint
    assert torch.equal(view, weight)


def test_writing_to_a_view_leaves_the_file_alone(folder):
    save_file({"weight": torch.zeros(4)}, folder / "model.safetensors")
    before = (folder / "model.safetensors").read_bytes()
    open_checkpoint(folder).read("weight").fill_(1)
    assert (folder / "model.safetensors").read_bytes() == before


def test_elements_that_are_not_aligned(folder):
    # A header of odd length moves all data off their alignment; the format does not forbid it.
    data = torch.arange(6, dtype=torch.float32)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    header += b" " * ((1 - len(header)) % 4)
    write_raw(folder / "model.safetensors", header, data.numpy().tobytes())
    assert torch.equal(open_checkpoint(folder).rows("weight", 1, 2), data.view(2, 3)[1:])


def write_shards(folder, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(folder):
    first, second = torch.randn(3, 4), torch.randn(5)
    write_shards(folder, {"a-1.safetensors": {"first": first}, "a-2.safetensors": {"second": second}})
    checkpoint = open_checkpoint(folder)
    assert same(checkpoint.read("first"), first) and same(checkpoint.read("second"), second)


def test_a_missing_shard_is_named(folder):
    shards = {f"a-{i}.safetensors": {f"t{i}": torch.zeros(2)} for i in range(3)}
    write_shards(folder, shards)
    (folder / "a-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 files its index names: a-1\.safetensors"):
        open_checkpoint(folder)


def test_a_shard_without_a_tensor_of_the_index(folder):
    write_shards(folder, {"a.safetensors": {"t": torch.zeros(2), "u": torch.zeros(2)}})
    save_file({"t": torch.zeros(2)}, folder / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors has no tensor u, which the index says it has"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards(folder):
    write_shards(folder, {"a.safetensors": {"t": torch.zeros(2)}, "b.safetensors": {"t": torch.zeros(2)}})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="both have the tensor t"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", 3])
def test_an_index_names_only_files_beside_it(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CheckpointError, match=re.escape(f"names the file {name!r}")):
        open_checkpoint(folder)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header,data,message",
    [
        ({"t": ENTRY}, bytes(15), "is truncated: it has"),
        ({"t": ENTRY}, bytes(17), "is longer than its tensors"),
        (
            {"t": ENTRY | {"dtype": "Q9"}},
            bytes(16),
            "the tensor t has the unknown dtype 'Q9', expected one of F64",
        ),
        ({"t": ENTRY | {"shape": [2, 3]}}, bytes(16), "is F32 [2, 3], 24 bytes, but has data_offsets [0, 16]"),
        ({"t": ENTRY | {"shape": [-2, -2]}}, bytes(16), "has the impossible shape [-2, -2]"),
        ({"t": ENTRY | {"shape": [2.0, 2]}}, bytes(16), "has the impossible shape"),
        ({"t": ENTRY | {"shape": "22"}}, bytes(16), "has the impossible shape '22'"),
        ({"t": ENTRY | {"data_offsets": [16, 0]}}, bytes(16), "but has data_offsets [16, 0]"),
        ({"t": ENTRY | {"data_offsets": [0, 16, 32]}}, bytes(16), "impossible data_offsets"),
        ({"t": ENTRY | {"data_offsets": [-16, 0]}}, bytes(16), "impossible data_offsets"),
        ({"t": ENTRY, "u": ENTRY}, bytes(16), "the tensor u begins at byte"),
        ({"t": ENTRY, "u": ENTRY | {"data_offsets": [24, 40]}}, bytes(40), "the tensor u begins at byte"),
        ({"t": {"dtype": "F32"}}, bytes(16), "lacks its dtype, shape or data_offsets"),
        ({"t": 3}, bytes(16), "lacks its dtype, shape or data_offsets"),
        ([1], b"", "its header is not an object"),
        (b'{"t": 1, "t": 2}', b"", "names a tensor twice"),
        (b"{not json", b"", "is not safetensors"),
        (b"[" * 100_000, b"", "is not safetensors"),
        (b"\xff\xfe", b"", "is not safetensors"),
    ],
)
def test_broken_files(folder, header, data, message):
    write_raw(folder / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        open_checkpoint(folder)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize("header_bytes,message", [(1000, "is truncated: it has"), (2**63, "is not safetensors")])
def test_a_header_longer_than_the_file(folder, header_bytes, message):
    write_raw(folder / "model.safetensors", {"t": ENTRY}, bytes(16), header_bytes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("content,message", [(b"", "is empty"), (b"abc", "has 3 bytes, too few")])
def test_hardly_a_file(folder, content, message):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_every_cut_of_a_file_is_found(folder):
    save_file({"t": torch.ones(3, 3), "u": torch.ones(2)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    for size in range(len(whole)):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    "file,message",
    [
        ("pytorch_model.bin", "only pickled weights (pytorch_model.bin)"),
        ("model.gguf", "name the GGUF file itself"),
        ("notes.txt", "it is not a model folder, or its download is not complete"),
    ],
)
def test_folders_without_safetensors(folder, file, message):
    (folder / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(folder)


def test_config_must_be_there_and_an_object(tmp_path):
    save_file({"t": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds a list, expected an object"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        open_checkpoint(tmp_path)


def test_the_fingerprint_tells_checkpoints_apart(folder):
    path = folder / "model.safetensors"

    def fingerprint(tensors: dict[str, torch.Tensor] | None = None) -> str:
        if tensors:
            save_file(tensors, path)
        return open_checkpoint(folder).fingerprint

    first = fingerprint({"t": torch.ones(4)})
    assert fingerprint() == first
    seen = {first, fingerprint({"u": torch.ones(4)}), fingerprint({"u": torch.ones(4, dtype=torch.float16)})}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"more": 1}))
    seen.add(fingerprint())
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.add(fingerprint())
    assert len(seen) == 5
