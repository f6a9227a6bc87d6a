"""Encodes weights as JSON and a file of tensors, and decodes them; counts the formats of a checkpoint's tensors.

A value is a tensor, a frozen dataclass of this package, a tuple, a type of tensors, or a plain number, string, bool or
None, nested in any way: a new kind of packed weight needs no code here.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.weights.checkpoint import Checkpoint
from tilewright.weights.safetensors import MappedFile

# Alignment of a tensor in a file, whatever the page size of this machine: the next may have another. Nothing is mapped
# or advised per tensor, so two may share a page of 16 or 64 KiB.
_BOUNDARY_BYTES = 4 << 10
_PACKAGE = "tilewright."


class ValueEncoder:
    """Assigns every tensor an offset in a file, and encodes values as JSON."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.tensors: list[tuple[int, Tensor]] = []  # offset in the file, in ascending order

    def encode(self, value: object) -> object:
        """Return the value in JSON's types; its tensors are appended to `tensors`."""
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item) for item in value]}
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith(_PACKAGE):
            fields = {field.name: self.encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"class": type(value).__qualname__, "module": type(value).__module__, "fields": fields}
        if isinstance(value, torch.dtype):
            return {"dtype": _name_of(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"a weight's value has a {type(value).__name__}, which cannot be kept")

    def _encode_tensor(self, tensor: Tensor) -> object:
        # Huge pages belong to the file, not to a tensor: boundaries of 2 MiB would gain nothing, and cost 8 % of the
        # memory of a model of 135 million parameters.
        offset = -(-self.size_bytes // _BOUNDARY_BYTES) * _BOUNDARY_BYTES
        self.tensors.append((offset, tensor))
        self.size_bytes = offset + tensor.numel() * tensor.element_size()
        return {"tensor": offset, "shape": list(tensor.shape), "dtype": _name_of(tensor.dtype)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(encoded: object, file: MappedFile) -> object:
    """Return the value that `ValueEncoder.encode` got, its tensors in place in the file."""
    if not isinstance(encoded, dict):
        return encoded
    if "tuple" in encoded:
        return tuple(decode(item, file) for item in encoded["tuple"])
    if "tensor" in encoded:
        dtype = getattr(torch, encoded["dtype"])
        end = encoded["tensor"] + math.prod(encoded["shape"]) * dtype.itemsize
        assert isinstance(dtype, torch.dtype) and 0 <= encoded["tensor"] <= end <= file.size_bytes
        return file.tensor_at(encoded["tensor"], tuple(encoded["shape"]), dtype)
    if "dtype" in encoded:
        named = getattr(torch, encoded["dtype"])
        assert isinstance(named, torch.dtype)
        return named
    assert encoded["module"].startswith(_PACKAGE), encoded["module"]
    value_class = getattr(importlib.import_module(encoded["module"]), encoded["class"])
    # Nothing else of a module can be called, whatever the file asks for.
    assert isinstance(value_class, type) and dataclasses.is_dataclass(value_class), encoded["class"]
    return value_class(**{name: decode(value, file) for name, value in encoded["fields"].items()})


@dataclass(frozen=True)
class StoredFormat:
    """The tensors of a checkpoint in one format."""

    name: str  # as for packed weights ("int4 in groups of 128"), or a type
    num_tensors: int
    size_bytes: int  # in the files, scales included


def stored_formats(checkpoint: Checkpoint) -> list[StoredFormat]:
    """Return the formats of all tensors, largest total size first."""
    found: dict[str, StoredFormat] = {}
    for tensor in checkpoint.shapes:
        format = checkpoint.quantized_as(tensor)
        if format is None:
            name = str(checkpoint.dtype(tensor)).removeprefix("torch.")
        else:
            name = f"{format[0]} in groups of {format[1]}" if format[1] else format[0]
        before = found.get(name, StoredFormat(name, 0, 0))
        size_bytes = before.size_bytes + checkpoint.size_bytes(tensor)
        found[name] = StoredFormat(name, before.num_tensors + 1, size_bytes)
    return sorted(found.values(), key=lambda item: -item.size_bytes)
