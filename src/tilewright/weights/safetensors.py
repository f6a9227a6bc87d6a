"""Memory-mapped safetensors files and folders of them, read as tensors without a copy.

The format is eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}} and the data. It is read
here because the safetensors package keeps every touched page while the file is open: resident memory would end at the
whole checkpoint beside the packed weights. Here `release` frees pages block by block. Nothing in a file is trusted:
sizes, offsets and overlaps are checked before any of it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.host import files
from tilewright.host.files import MAX_JSON_BYTES, CheckpointError, foreign_kind, read_file, read_json
from tilewright.host.memory import MAP_NORESERVE, shortage_text, size_text
from tilewright.ops.quantized import Quantized


class MappedFile:
    """A file as memory. Writing to one of its tensors changes a private copy of the page, never the file.

    Mapped writable because torch warns about read-only memory; pages are shared until written in any case.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with files.open_regular(path) as file:
                status = os.fstat(file.fileno())
                self.size_bytes, self.modified_ns = status.st_size, status.st_mtime_ns
                if self.size_bytes == 0:
                    raise CheckpointError(f"{path} is empty: download it again")
                self.memory = mmap.mmap(
                    file.fileno(),
                    self.size_bytes,
                    flags=mmap.MAP_PRIVATE | MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.ENOMEM:
                reason = f"it has {size_text(self.size_bytes)} to be mapped: {shortage_text()}"
            raise CheckpointError(f"{path} cannot be read: {reason}") from error

    def bytes_at(self, offset: int, size_bytes: int) -> Tensor:
        """Return `size_bytes` bytes of the file, uint8, in place. The caller has checked that the file has them."""
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size_bytes, offset=offset)

    def tensor_at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the file: in place, or a copy if its elements are not aligned."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        data = self.bytes_at(offset, num_elements * dtype.itemsize)
        if offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def release(self, offset: int, size_bytes: int) -> None:
        """Release the pages of a range: they no longer count as this process's, and are read again when touched."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes:
            self.memory.madvise(mmap.MADV_DONTNEED, begin, offset + size_bytes - begin)

    def will_need(self, offset: int, size_bytes: int) -> None:
        """Ask the system to start reading a range from disk."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes:
            self.memory.madvise(mmap.MADV_WILLNEED, begin, offset + size_bytes - begin)


WEIGHT_STEMS = ("model", "diffusion_pytorch_model")  # file names of transformers and diffusers
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """Place of a tensor in a file."""

    file: MappedFile
    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsCheckpoint:
    """A folder with config.json and safetensors: a `weights.checkpoint.Checkpoint`."""

    tokenizer_metadata: Mapping[str, object] | None = None
    missing: str | None = None

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.files: Path | None = folder
        self.config: dict = _without_nulls(read_json(folder / "config.json"))
        self._entries: dict[str, TensorEntry] = {}
        digest = hashlib.sha256(read_file(folder / "config.json", MAX_JSON_BYTES))
        expected, paths = _weight_files(folder)
        for path in paths:
            file = MappedFile(path)
            header, entries = read_header(file)
            digest.update(f"{path.name} {file.size_bytes} {file.modified_ns} {len(header)} ".encode() + header)
            for name, entry in entries.items():
                if name in self._entries:
                    other = self._entries[name].file.path.name
                    raise CheckpointError(f"{path} and {other} both have the tensor {name}: download them again")
                self._entries[name] = entry
        for name, path in expected.items():
            if name not in self._entries or self._entries[name].file.path != path:
                raise CheckpointError(f"{path} has no tensor {name}, which the index says it has: download both again")
        self.fingerprint = digest.hexdigest()
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def size_bytes(self, name: str) -> int:
        return self._entries[name].size_bytes

    def read(self, name: str) -> Tensor:
        """Return the tensor in place: a view of the mapped file."""
        entry = self._entries[name]
        entry.file.will_need(entry.offset, entry.size_bytes)
        return entry.file.tensor_at(entry.offset, entry.shape, entry.dtype)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of the tensor's first axis, in place."""
        entry = self._entries[name]
        row_bytes = entry.size_bytes // max(entry.shape[0], 1)
        # The rows after these are requested as well, so that the disk reads while these are packed.
        ahead = min((end - begin) * 2 * row_bytes, entry.size_bytes - begin * row_bytes)
        entry.file.will_need(entry.offset + begin * row_bytes, ahead)
        shape = (end - begin, *entry.shape[1:])
        return entry.file.tensor_at(entry.offset + begin * row_bytes, shape, entry.dtype)

    def quantized_as(self, name: str) -> None:
        """Return None: no tensor here is quantised."""

    def quantized_rows(self, name: str, begin: int, end: int) -> Quantized:
        raise ValueError(f"{name} is not quantised")

    def release(self, name: str) -> None:
        """Release the tensor's pages; views of it stay valid and read them again."""
        entry = self._entries[name]
        entry.file.release(entry.offset, entry.size_bytes)


def _without_nulls(config: dict) -> dict:
    """Remove null entries from a config, so that the reader's defaults hold."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None
    }


def _weight_files(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the file that each tensor must be in, if there is an index, and all files to read."""
    for stem in WEIGHT_STEMS:
        if files.exists(index := folder / f"{stem}.safetensors.index.json"):
            return _indexed_files(folder, index)
        if files.exists(single := folder / f"{stem}.safetensors"):
            return {}, [single]
    raise CheckpointError(_no_weights_message(folder))


def _indexed_files(folder: Path, index: Path) -> tuple[dict[str, Path], list[Path]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    for name in weight_map.values():
        # Only files beside the index: a path could make us read any file of this machine.
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, expected a .safetensors file beside it")
    shards = sorted({folder / name for name in weight_map.values()})
    missing = [path.name for path in shards if not files.exists(path)]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files its index names: "
            f"{', '.join(missing[:20])}: download them"
        )
    return {name: folder / file for name, file in weight_map.items()}, shards


def _no_weights_message(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror or error}"
    looked_for = f"{folder} has neither model.safetensors nor model.safetensors.index.json"
    gguf = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if gguf:
        return f"{looked_for}, but {', '.join(gguf[:5])}: name the GGUF file itself"
    if pickles:
        return (
            f"{looked_for}, only pickled weights ({', '.join(pickles[:5])}), which can run any code when opened: "
            "get the safetensors of this model, or convert it"
        )
    return f"{looked_for}: it is not a model folder, or its download is not complete"


def read_header(file: MappedFile) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the header's bytes, and its tensors, each within the file and without overlaps."""
    if file.size_bytes < 8:
        raise CheckpointError(f"{file.path} has {file.size_bytes} bytes, too few for a header: download it again")
    header_bytes = int.from_bytes(file.memory[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _wrong_header(file, f"not safetensors: a header of {header_bytes} bytes is over the limit")
    if 8 + header_bytes > file.size_bytes:
        raise _wrong_header(
            file,
            f"truncated: it has {file.size_bytes} bytes, its header ends at {8 + header_bytes}: download it again",
        )
    header = file.memory[8 : 8 + header_bytes]
    try:
        listed = json.loads(header, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise _wrong_header(file, f"not safetensors: {error}") from error
    if not isinstance(listed, dict):
        raise CheckpointError(f"{file.path} is not safetensors: its header is not an object")
    listed.pop("__metadata__", None)
    entries = {name: _entry(file, 8 + header_bytes, name, fields) for name, fields in listed.items()}
    _check_extent(file, 8 + header_bytes, entries)
    return header, entries


def _wrong_header(file: MappedFile, state: str) -> CheckpointError:
    """Return an error that says what the file is, if it is recognised, else its `state`."""
    return CheckpointError(f"{file.path} is {foreign_kind(file.memory[:256]) or state}")


def _unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("its header names a tensor twice")
    return names


def _entry(file: MappedFile, data_begin: int, name: str, fields: object) -> TensorEntry:
    def is_size(value: object) -> bool:
        return type(value) is int and 0 <= value < 2**62

    where = f"{file.path}: the tensor {name}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointError(f"{where} lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has the unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(is_size(size) for size in shape):
        raise CheckpointError(f"{where} has the impossible shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where} has the impossible data_offsets {offsets!r}")
    size_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size_bytes:
        raise CheckpointError(
            f"{where} is {dtype} {shape}, {size_bytes} bytes, but has data_offsets {offsets}: the file is damaged"
        )
    return TensorEntry(file, data_begin + offsets[0], size_bytes, tuple(shape), DTYPES[dtype])


def _check_extent(file: MappedFile, data_begin: int, entries: dict[str, TensorEntry]) -> None:
    """Check that tensors have no gap and no overlap; data that end before or after the file mean a broken download."""
    position = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{file.path}: the tensor {name} begins at byte {entry.offset}, the one before it ends at {position}"
            )
        position += entry.size_bytes
    if position != file.size_bytes:
        state = "truncated" if position > file.size_bytes else "longer than its tensors"
        raise CheckpointError(
            f"{file.path} is {state}: it has {file.size_bytes} bytes, its tensors end at {position}: download it again"
        )
