"""A checkpoint, whatever its format: a config as Hugging Face's config.json, and tensors by their names there."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError
from tilewright.ops.quantized import Quantized
from tilewright.weights import hub
from tilewright.weights.gguf.checkpoint import GgufCheckpoint
from tilewright.weights.gguf.projector import NO_PROJECTOR
from tilewright.weights.quantized import with_linears
from tilewright.weights.safetensors import SafetensorsCheckpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


class Checkpoint(Protocol):
    """What loading asks of a checkpoint. Opening one reads headers only."""

    path: Path  # the folder or the GGUF file
    config: dict  # as config.json, without what is null there
    shapes: Mapping[str, tuple[int, ...]]
    fingerprint: str  # differs when any file's name, size, time or header does
    files: Path | None  # the folder with tokenizer and templates; None: tokenizer_metadata has them
    tokenizer_metadata: Mapping[str, object] | None  # a GGUF file's tokenizer.* keys
    missing: str | None  # what a request with a picture is told: the file that the model sees with and that is not here

    def dtype(self, name: str) -> torch.dtype:
        """The type `read` gives."""

    def size_bytes(self, name: str) -> int:
        """What the tensor takes in the file."""

    def read(self, name: str) -> Tensor:
        """The tensor, in place where the format allows; not to be written to."""

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of its first axis, in place where the format allows."""

    def quantized_as(self, name: str) -> tuple[str, int] | None:
        """The format that has a tensor's own quants (`ops.packed.weight_format`); None: `rows` has all there is."""

    def quantized_rows(self, name: str, begin: int, end: int) -> Quantized:
        """Return rows [begin, end) as those quants."""

    def release(self, name: str) -> None:
        """Gives back the memory of what was read of it; what `read` and `rows` gave stays valid."""


def open_checkpoint(model: str | Path, mmproj: str | Path | None = None) -> Checkpoint:
    """The checkpoint in a folder or a .gguf file, or what a hub id such as "org/name" downloads to.

    `mmproj`: the projector of a .gguf file, for pictures; "none": text alone; None: the one beside it that fits.
    """
    path = local_path(model)
    if not path.is_dir():
        return GgufCheckpoint(path, mmproj)
    if mmproj not in (None, NO_PROJECTOR):
        raise CheckpointError(f"mmproj is {mmproj}, and {path} is a folder: projector files go with GGUF files")
    return with_linears(SafetensorsCheckpoint(path))


def local_path(model: str | Path) -> Path:
    """The folder or the .gguf file that `model` names, downloaded if it is a hub id."""
    path = hub.find(model)
    if path is None:
        return hub.download(str(model))
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if is_folder or path.suffix == ".gguf":
        return path
    raise CheckpointError(f"{path} is no model: expected a folder, a .gguf file or a hub id")
