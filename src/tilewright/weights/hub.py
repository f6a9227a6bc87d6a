"""Models of the Hugging Face hub, downloaded to its cache on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from tilewright.model_files import CheckpointError

# All that is read of a model, and no pickle, which could run code: weights, configs, templates, tokenizers.
ALLOWED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# Subfolders hold the same model in other formats; so do the consolidated files beside the shards.
IGNORED_FILES = ["*/*", "consolidated*"]
# Of a pipeline in diffusers' layout: the components' folders, not the same weights in one file, nor in fp16 beside.
PIPELINE_FILES = ["model_index.json", "generation_config.json", *(f"*/{pattern}" for pattern in ALLOWED_FILES)]
IGNORED_PIPELINE_FILES = ["*/*/*", "*.fp16.safetensors", "*.fp16-*.safetensors"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(model: str) -> bool:
    """Whether `model` could be one: "organisation/name"."""
    return _ID.fullmatch(model) is not None


def download(model_id: str) -> Path:
    """The folder with the model's files. Files already there are not fetched again; an interrupted download resumes."""
    return _download(model_id, ALLOWED_FILES, IGNORED_FILES)


def download_pipeline(model_id: str) -> Path:
    """The same of a pipeline in diffusers' layout."""
    return _download(model_id, PIPELINE_FILES, IGNORED_PIPELINE_FILES)


def _download(model_id: str, allowed: list[str], ignored: list[str]) -> Path:
    # Imported here: a local folder needs none of it, and it takes a while.
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
