"""Hub ids: what is asked of the hub, and what is said when it does not answer. No request leaves the machine."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from tilewright.weights.checkpoint import CheckpointError, open_checkpoint
from tilewright.weights.hub import download_pipeline, is_hub_id


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub's one function, in place of the library's: notes what it was asked, gives a folder or raises."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "test"}))
    save_file({"t": torch.ones(2)}, folder / "model.safetensors")
    stub = SimpleNamespace(folder=folder, calls=[], error=None)

    def snapshot_download(repo_id: str, **options: object) -> str:
        stub.calls.append((repo_id, options))
        if stub.error:
            raise stub.error
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return stub


def test_a_hub_id_opens_what_was_downloaded(hub):
    checkpoint = open_checkpoint("org/name-1.5B")
    assert checkpoint.files == hub.folder and torch.equal(checkpoint.read("t"), torch.ones(2))
    assert [repo_id for repo_id, _ in hub.calls] == ["org/name-1.5B"]


def test_only_what_is_read_is_asked_for(hub):
    open_checkpoint("org/name")
    options = hub.calls[0][1]
    offered = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja",
        "merges.txt", "tokenizer.model", "pytorch_model.bin", "model.pt", "args.pickle", "original/params.json",
        "onnx/model.safetensors", "consolidated.safetensors", "code.py", "README.md",
    ]  # fmt: skip
    taken = list(huggingface_hub.utils.filter_repo_objects(offered, **options))
    assert taken == offered[:6]


def test_of_a_pipeline_the_components_folders_are_asked_for(hub):
    assert download_pipeline("org/name") == hub.folder
    offered = [
        "model_index.json", "generation_config.json", "transformer/config.json",
        "text_encoder/model.safetensors.index.json",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors", "tokenizer/tokenizer.json",
        "tokenizer/merges.txt", "vae/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bin",
        "whole-model.safetensors", "assets/picture.png", "original/transformer/model.safetensors", "README.md",
    ]  # fmt: skip
    taken = list(huggingface_hub.utils.filter_repo_objects(offered, **hub.calls[0][1]))
    assert taken == offered[:7]


def test_a_folder_of_that_name_comes_first(hub, tmp_path):
    (tmp_path / "org").mkdir()
    hub.folder.rename(tmp_path / "org" / "name")
    open_checkpoint("org/name")
    assert hub.calls == []


def http_error(kind: type) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "the server's words")
    return error


@pytest.mark.parametrize(
    "error,message",
    [
        (http_error(errors.GatedRepoError), r"org/name is gated: accept its terms .* `hf auth login` or set HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError), "org/name is neither a folder here nor a model of the hub"),
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached .*HF_HUB_OFFLINE.*path of a model folder"),
        (errors.OfflineModeIsEnabled("no"), "the hub cannot be reached"),
        (ConnectionError("no"), "the hub cannot be reached"),
        (
            OSError(28, "No space left on device"),
            "downloading org/name failed: .*No space left.*run it again to resume",
        ),
        (RuntimeError("odd"), "downloading org/name failed: odd"),
    ],
)
def test_failures_say_what_to_do(hub, error, message):
    hub.error = error
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint("org/name")


@pytest.mark.parametrize(
    "model", ["/no/such", "./org/name", "../org/name", "name", "a/b/c", "~/model", "org/name\n", ""]
)
def test_what_is_no_hub_id_is_never_asked_for(hub, model):
    assert not is_hub_id(model)
    with pytest.raises(CheckpointError, match=r"does not exist|is missing|is not a model"):
        open_checkpoint(model)
    assert hub.calls == []
