"""The interface of all checkpoint formats: a config like Hugging Face's config.json, and tensors by their names."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.ops.quantized import QuantFormat, Quantized
from tilewright.weights import hub
from tilewright.weights.gguf.checkpoint import GgufCheckpoint
from tilewright.weights.gguf.projector import NO_PROJECTOR
from tilewright.weights.quantized import with_linears
from tilewright.weights.safetensors import SafetensorsCheckpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


class Checkpoint(Protocol):
    """A checkpoint to load. Opening one reads headers only."""

    path: Path  # the folder or the GGUF file
    config: dict  # as config.json, without null entries
    shapes: Mapping[str, tuple[int, ...]]
    fingerprint: str  # changes with any file's name, size, time or header
    files: Path | None  # the folder with tokenizer and templates; None: tokenizer_metadata has them
    tokenizer_metadata: Mapping[str, object] | None  # a GGUF file's tokenizer.* keys
    missing: str | None  # the missing file of a model that could see, as the error for images names it

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of what `read` returns."""

    def size_bytes(self, name: str) -> int:
        """Return the tensor's size in the file."""

    def read(self, name: str) -> Tensor:
        """Return the tensor, read-only, as a view if the format allows."""

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of its first axis, as a view if the format allows."""

    def quantized_as(self, name: str) -> QuantFormat | None:
        """Return the format of a tensor's own quants (`ops.packed.weight_format`); None if `rows` is exact."""

    def quantized_rows(self, name: str, begin: int, end: int) -> Quantized:
        """Return rows [begin, end) as those quants."""

    def release(self, name: str) -> None:
        """Release the memory of the tensor's pages; results of `read` and `rows` stay valid."""


def open_checkpoint(model: str | Path, mmproj: str | Path | None = None) -> Checkpoint:
    """Open the checkpoint in a folder, a .gguf file, or the download of a hub id such as "org/name".

    `mmproj`: the projector of a .gguf file, for images; "none": text only; None: the fitting one beside the file.
    """
    path = local_path(model)
    if not path.is_dir():
        return GgufCheckpoint(path, mmproj)
    if mmproj not in (None, NO_PROJECTOR):
        raise CheckpointError(f"mmproj is {mmproj}, and {path} is a folder: projector files go with GGUF files")
    return with_linears(SafetensorsCheckpoint(path))


def local_path(model: str | Path) -> Path:
    """Return the folder or the .gguf file that `model` names, downloaded if it is a hub id."""
    path = hub.find(model)
    if path is None:
        return hub.download(str(model))
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if is_folder or path.suffix == ".gguf":
        return path
    raise CheckpointError(f"{path} is not a model: expected a folder, a .gguf file or a hub id")
