"""The small files of a model's folder, and what a file is that is not what its name says. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from tilewright import files

MAX_JSON_BYTES = 64 << 20  # an index of 140,000 tensors has 15 MB
MAX_VOCABULARY_BYTES = 256 << 20  # tokenizer.json, vocab.json, merges.txt: those of 260,000 tokens have 35 MB
MAX_TEMPLATE_BYTES = 4 << 20  # the longest chat templates have 30 KB

# What stands in for a file that was not really downloaded, or was renamed: how it begins, and what that is.
_BEGINNINGS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"<!doctype html", "an HTML page, as a failed or refused download leaves it: download the file again"),
    (b"<html", "an HTML page, as a failed or refused download leaves it: download the file again"),
    (b"<?xml", "an XML document, as a failed or refused download leaves it: download the file again"),
    (b"gguf", "a GGUF file: name it with the ending .gguf"),
    (b"pk\x03\x04", "a ZIP archive, as pickled PyTorch weights are: get the safetensors of this model, or convert it"),
    (b"\x80\x02", "a pickle, which can run any code when opened: get the safetensors of this model, or convert it"),
    (b"\x1f\x8b", "compressed by gzip: unpack it"),
)
_BOM = b"\xef\xbb\xbf"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names the file, what is wrong with it and what to do."""


def foreign_kind(beginning: bytes) -> str | None:
    """What a file is that begins so, and what to do; None: nothing that is known to take a model file's place."""
    text = beginning[:256].removeprefix(_BOM).lstrip().lower()
    return next((kind for start, kind in _BEGINNINGS if text.startswith(start)), None)


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The bytes of a small file of a model; CheckpointError if it cannot be read or has more than `limit_bytes`."""
    try:
        return files.read_bytes(path, limit_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model folder has config.json and safetensors") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_file(path: Path, limit_bytes: int) -> None:
    """CheckpointError where `read_file` would raise one, for a library that reads the file itself."""
    try:
        files.open_regular(path, limit_bytes).close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_template(path: Path) -> str:
    """The text of a chat template; CheckpointError if there is none."""
    data = read_file(path, MAX_TEMPLATE_BYTES)
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is {foreign_kind(data) or f'not UTF-8: {error}'}") from error


def read_json(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict:
    """The object in a JSON file; CheckpointError if there is none."""
    data = read_file(path, limit_bytes)
    try:
        value = json.loads(data.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is {_not_json(data, error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def read_optional_json(path: Path) -> dict:
    """The object in a JSON file, an empty one where there is no file."""
    return read_json(path) if files.exists(path) else {}


def _not_json(data: bytes, error: Exception) -> str:
    if not data:
        return "empty: download it again"
    return foreign_kind(data) or f"not JSON: {error}"
