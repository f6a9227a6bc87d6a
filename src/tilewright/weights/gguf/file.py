"""The GGUF container (versions 2 and 3): its metadata, and the place of each tensor. Nothing in a file is trusted."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilewright.host.files import CheckpointError, foreign_kind
from tilewright.weights.dequantize import FORMATS, GgufFormat, dequantize
from tilewright.weights.safetensors import MappedFile

VERSIONS = (2, 3)
MAX_RANK = 4
MAX_HEADER_BYTES = 100_000_000  # as for safetensors; a vocabulary of 260,000 tokens with its merges takes 15 MB
MAX_ARRAY = 1 << 22  # elements of a list in the metadata: the largest vocabularies have 262,144

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", _BOOL: "?", 10: "u8", 11: "i8", 12: "f8"}


@dataclass(frozen=True)
class PlacedTensor:
    """Place and format of a tensor; `shape` starts with the longest stride, as in torch."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    format: GgufFormat
    file: MappedFile

    @property
    def dtype(self) -> torch.dtype:
        """Type of the result of `rows`."""
        return self.format.dtype

    def stored(self, begin: int, end: int) -> Tensor:
        """Return the bytes of rows [begin, end) of the first axis."""
        row_bytes = self.size_bytes // max(self.shape[0], 1)
        return _aligned(self.file.bytes_at(self.offset + begin * row_bytes, (end - begin) * row_bytes))

    def rows(self, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of the first axis: in place for F32, F16 and BF16, else decoded to fp32."""
        if len(self.shape) == 1:
            # A vector is one row of the format.
            data = _aligned(self.file.bytes_at(self.offset, self.size_bytes))
            return dequantize(data, self.format, self.shape[0])[0, begin:end]
        data = dequantize(self.stored(begin, end), self.format, self.shape[-1])
        return data.view(end - begin, *self.shape[1:])

    def release(self) -> None:
        """Release its pages."""
        self.file.release(self.offset, self.size_bytes)


def _aligned(data: Tensor) -> Tensor:
    # A file may ask for an alignment below that of its elements.
    return data if data.data_ptr() % 4 == 0 else data.clone()


class GgufFile:
    """A GGUF file's metadata and tensors by name, all within the file."""

    def __init__(self, path: Path) -> None:
        self.mapped = MappedFile(path)
        cursor, num_tensors, num_keys = _begin(self.mapped)
        self.metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise CheckpointError(f"{path} has the key {key} twice")
            self.metadata[key] = cursor.value(cursor.number("u4"), key)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise CheckpointError(f"{path} has the impossible general.alignment {alignment!r}")
        listed = [self._tensor_info(cursor) for _ in range(num_tensors)]
        self.header_bytes = cursor.position
        data_begin = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, PlacedTensor] = {}
        for name, shape, stored, offset in listed:
            if name in self.tensors:
                raise CheckpointError(f"{path} has the tensor {name} twice")
            size_bytes = math.prod(shape[:-1]) * stored.row_bytes(shape[-1])
            self.tensors[name] = PlacedTensor(data_begin + offset, size_bytes, shape, stored, self.mapped)
        self._check_extent()

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GgufFormat, int]:
        name = cursor.string()
        where = f"{self.mapped.path}: the tensor {name}"
        rank = cursor.number("u4")
        if not 1 <= rank <= MAX_RANK:
            raise CheckpointError(f"{where} has {rank} axes, expected 1 to {MAX_RANK}")
        shape = tuple(cursor.number("u8") for _ in range(rank))[::-1]
        if 0 in shape:
            raise CheckpointError(f"{where} has the shape {list(shape)}, which holds nothing")
        number, offset = cursor.number("u4"), cursor.number("u8")
        if number not in FORMATS:
            supported = ", ".join(stored.name for stored in FORMATS.values())
            raise CheckpointError(f"{where} has the type {_type_name(number)}; those supported are {supported}")
        stored = FORMATS[number]
        if shape[-1] % stored.block_elements:
            raise CheckpointError(
                f"{where} has rows of {shape[-1]}, which {stored.name} cuts into blocks of {stored.block_elements}"
            )
        return name, shape, stored, offset

    def _check_extent(self) -> None:
        end, before = 0, ""
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise CheckpointError(f"{self.mapped.path}: the tensors {before} and {name} overlap")
            end, before = tensor.offset + tensor.size_bytes, name
        if end > self.mapped.size_bytes:
            raise CheckpointError(
                f"{self.mapped.path} is truncated: it has {self.mapped.size_bytes} bytes, {before} ends at {end}: "
                "download it again"
            )


def architecture_of(path: Path) -> object:
    """Return a file's general.architecture, or None, without reading later metadata such as the vocabulary."""
    mapped = MappedFile(path)
    cursor, _, num_keys = _begin(mapped)
    for _ in range(num_keys):
        key = cursor.string()
        value = cursor.value(cursor.number("u4"), key)
        if key == "general.architecture":
            return value
    return None


def _begin(mapped: MappedFile) -> tuple[_Cursor, int, int]:
    """Return a cursor at a file's first key, and its numbers of tensors and keys."""
    cursor = _Cursor(mapped)
    magic = cursor.read(4)
    if magic != b"GGUF":
        found = foreign_kind(mapped.memory[:256])
        raise CheckpointError(f"{mapped.path} is {found or f'no GGUF file: it begins with {magic!r}'}")
    version = cursor.number("u4")
    if version not in VERSIONS:
        raise CheckpointError(f"{mapped.path} is GGUF version {version}, expected 2 or 3, little-endian")
    return cursor, cursor.number("u8"), cursor.number("u8")


# Names for error messages only; the types in FORMATS are supported.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


def _type_name(number: int) -> str:
    return _OTHER_TYPES.get(number, f"number {number}")


class _Cursor:
    """Reads a file's header in order; CheckpointError past its end."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.position = 0

    def read(self, size_bytes: int) -> bytes:
        begin, self.position = self.position, self.position + size_bytes
        self._check(self.position)
        return self._file.memory[begin : self.position]

    def number(self, kind: str) -> int:
        return int.from_bytes(self.read(int(kind[1])), "little")

    def string(self) -> str:
        return self.read(self.number("u8")).decode("utf-8", errors="replace")

    def value(self, kind: int, key: str) -> object:
        """Return a value of the type with GGUF's number `kind`; arrays as lists."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalars(kind, 1, key)[0]
        kind, count = self.number("u4"), self.number("u8")
        if kind == _STRING:
            self._expect(count, 8, key)
            return self._strings(count)
        if kind == _ARRAY:
            raise CheckpointError(f"{self._file.path}: {key} is an array of arrays, which no known key is")
        return self._scalars(kind, count, key)

    def _scalars(self, kind: int, count: int, key: str) -> list:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._file.path}: {key} has a value of the unknown type {kind}")
        dtype = np.dtype(f"<{_SCALARS[kind]}" if kind != _BOOL else "u1")
        self._expect(count, dtype.itemsize, key)
        values = np.frombuffer(self.read(count * dtype.itemsize), dtype)
        return (values != 0).tolist() if kind == _BOOL else values.tolist()

    def _check(self, end: int) -> None:
        """Raise if the header's next field ends after the file or our limit."""
        if end > self._file.size_bytes:
            raise CheckpointError(
                f"{self._file.path} is truncated or damaged: its header asks for byte {end} "
                f"of {self._file.size_bytes}: download it again"
            )
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self._file.path} has a header of {end} bytes or more, the limit is {MAX_HEADER_BYTES}"
            )

    def _expect(self, count: int, item_bytes: int, key: str) -> None:
        """Check a count that the file claims, before memory is allocated for it."""
        size_bytes = count * item_bytes
        if size_bytes > self._file.size_bytes - self.position:
            raise CheckpointError(f"{self._file.path}: {key} claims {size_bytes} bytes or more, past the file's end")
        if count > MAX_ARRAY:
            raise CheckpointError(f"{self._file.path}: {key} has {count} elements, the limit is {MAX_ARRAY}")

    def _strings(self, count: int) -> list[str]:
        # With 150,000 tokens in a vocabulary, a local loop takes a third of the time of calling string().
        memory, position = self._file.memory, self.position
        limit = min(self._file.size_bytes, MAX_HEADER_BYTES)
        strings = []
        for _ in range(count):
            begin = end = position + 8
            if begin <= limit:
                end += struct.unpack_from("<Q", memory, position)[0]
            if end > limit:
                self._check(end)
            strings.append(memory[begin:end].decode("utf-8", errors="replace"))
            position = end
        self.position = position
        return strings
