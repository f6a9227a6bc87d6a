"""Downloads models of the Hugging Face hub to its cache on this machine."""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path

from tilewright.host import files
from tilewright.host.files import CheckpointError
from tilewright.weights import embedded

# Everything that is read of a model, without pickles, which could run code: weights, configs, templates, tokenizers.
ALLOWED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# Subfolders hold the same model in other formats, as do the consolidated files beside the shards.
IGNORED_FILES = ["*/*", "consolidated*"]
# A pipeline in diffusers' layout: the components' folders, without copies in one file or in fp16.
PIPELINE_FILES = ["model_index.json", "generation_config.json", *(f"*/{pattern}" for pattern in ALLOWED_FILES)]
IGNORED_PIPELINE_FILES = ["*/*/*", "*.fp16.safetensors", "*.fp16-*.safetensors"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LONGEST_ID = 96  # characters, as the hub allows
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json", ".zip", ".gz", ".tar", ".onnx")


def find(model: str | Path, kinds: str = "a folder, a .gguf file or a hub id") -> Path | None:
    """Return the local path that `model` names; None for a hub id; CheckpointError if it is neither.

    `kinds`: what the error says is expected.
    """
    named = embedded.resolve(str(model))
    path = Path(named).expanduser()
    if files.exists(path):
        return path
    if isinstance(model, Path) or not is_hub_id(named):
        raise CheckpointError(f"{model} does not exist{_nearest(path)}: expected {kinds}")
    if path.parent.is_dir() and not _is_cached(named):
        raise CheckpointError(
            f"{model} does not exist{_nearest(path)}: the folder {path.parent} has no {path.name}; if it is a hub id, "
            f"run `hf download {model}` first"
        )
    return None


def is_hub_id(model: str) -> bool:
    """Return whether `model` may be a hub id: "organisation/name", and not the name of a file."""
    is_named_so = _ID.fullmatch(model) is not None and len(model) <= _LONGEST_ID
    return is_named_so and not model.lower().endswith(_FILE_ENDINGS) and "--" not in model and ".." not in model


def _nearest(path: Path) -> str:
    """Return a hint at an embedded model, a folder or a .gguf file whose name is close to that of `path`."""
    near = {name: name for name in embedded.names()} if path.parent == Path() else {}
    with contextlib.suppress(OSError):
        others = [other for other in path.parent.iterdir() if other.is_dir() or other.suffix == ".gguf"]
        near = {other.name: str(other) for other in others} | near
    found = difflib.get_close_matches(path.name, list(near), n=1)
    return f" (did you mean {near[found[0]]}?)" if found else ""


def _is_cached(model_id: str) -> bool:
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"models--{model_id.replace('/', '--')}").is_dir()


def check(model_id: str, file: str = "config.json") -> None:
    """Fetch one small file of a model, to raise the CheckpointError that its download would raise."""
    _download(model_id, [file], [])


def download(model_id: str) -> Path:
    """Return the folder with the model's files. Only missing files are fetched; an interrupted download resumes."""
    return _download(model_id, ALLOWED_FILES, IGNORED_FILES)


def download_pipeline(model_id: str) -> Path:
    """Return the folder with the files of a pipeline in diffusers' layout, downloaded like `download`."""
    return _download(model_id, PIPELINE_FILES, IGNORED_PIPELINE_FILES)


def _download(model_id: str, allowed: list[str], ignored: list[str]) -> Path:
    # Imported here: it is slow, and a local folder does not need it.
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=allowed, ignore_patterns=ignored))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model_id} is gated: accept its terms on its page at the hub, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model_id} is neither a folder here nor a model of the hub; if it is private, run `hf auth login`"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise CheckpointError(
            f"{model_id} is not on this machine, and the hub cannot be reached (no connection, or HF_HUB_OFFLINE is "
            "set): give the path of a model folder or a .gguf file, or go online once to download it"
        ) from error
    except Exception as error:  # of the HTTP library, the disk or the server
        raise CheckpointError(
            f"downloading {model_id} failed: {error}; run it again to resume, "
            "or give the path of a model folder or a .gguf file"
        ) from error
