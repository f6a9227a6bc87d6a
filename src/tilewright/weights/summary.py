"""What the weights of a checkpoint are stored in, by format: counted from its headers alone."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class StoredFormat:
    """The tensors of a checkpoint in one format."""

    name: str  # as of packed weights ("int4 in groups of 128"), or a type
    num_tensors: int
    size_bytes: int  # in the files, scales included


def stored_formats(checkpoint: Checkpoint) -> list[StoredFormat]:
    """The formats of all tensors, those that take most bytes first."""
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
