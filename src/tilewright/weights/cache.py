"""The pack cache: packed weights on disk, so that a second start maps a file instead of packing a checkpoint again.

An entry is one file: the tensors, each on a boundary of 4 KiB; a JSON header that describes how the values are made of
them, with a checksum of each MiB; a footer with the header's offset and SHA-256. It is written under another name and
renamed when all of it is on disk, so that an incomplete one is never seen; a file without its footer, or with a changed
header, is no entry either. Its name is a hash of what it must match: the checkpoint's fingerprint, the dtype, the
format of packed weights (values, groups, layout) and the recipe of every weight. Whatever changes, the file is simply
not found.

A byte may flip on the disk later, which would silently make every answer wrong. A start compares a random sample of the
checksums, which is all of a small model; `EntryCheck`, a thread of the lowest priority, compares the whole file at 200
MB/s while the model answers: a model of 40 GB takes three and a half minutes, a ninth of an otherwise idle core, and 1
% of the memory's bandwidth. CRC-32 finds every change of up to 32 consecutive bits and takes 0.6 s per GB on one core
(zlib: 1.8 GB/s, BLAKE2b 0.42, SHA-256 0.27, same machine, same run): it should find damage, not malice.

Entries are mapped, not read: the pages are the system's file cache, so a second start takes no time and two processes
share one copy. Decode is as fast from them: over 400 MB of weights one thread read 18.1 GB/s from mapped pages (18.2
with both madvise calls of `_populate`), 17.7 from anonymous huge ones and 18.1 from a file read into huge ones, which
took 1.6 s per GB to open instead of 0.001 (interleaved, per second of CPU time, best of 40, on a busy machine:
differences under 3 % mean nothing).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import random
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tilewright.host import memory
from tilewright.host.files import CheckpointError
from tilewright.ops.packed import weight_format
from tilewright.weights.safetensors import MappedFile
from tilewright.weights.spec import Weight
from tilewright.weights.values import ValueEncoder, decode

BLOCK_BYTES = 1 << 20  # 0.6 ms each, so that another thread soon gets the core; 450 kB of JSON for 40 GB


class ChecksummedWriter:
    """Writes data to a file in order, and computes the checksum of each block."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = 0
        self.checksums: list[int] = []

    def pad_to(self, offset: int) -> None:
        """Write zeros up to `offset`."""
        self.write(memoryview(bytes(offset - self.size_bytes)))

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        while data:
            filled = self.size_bytes % BLOCK_BYTES
            if not filled:
                self.checksums.append(0)
            part = data[: BLOCK_BYTES - filled]
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self.size_bytes += len(part)
            data = data[len(part) :]


@dataclass(frozen=True)
class ChecksummedData:
    """The first `size_bytes` of a mapped file, with the checksum of each block as written."""

    file: MappedFile
    size_bytes: int
    checksums: Sequence[int]

    def first_damaged(self, blocks: Iterable[int]) -> int | None:
        """Return the first of `blocks` that differs from what was written, or None."""
        memory = memoryview(self.file.memory)
        for block in blocks:
            begin = block * BLOCK_BYTES
            if zlib.crc32(memory[begin : min(begin + BLOCK_BYTES, self.size_bytes)]) != self.checksums[block]:
                return block
        return None


# Incremented when the bytes of a packed weight (csrc/base/tile.h), the fields of its classes or this format change.
LAYOUT_VERSION = 6

SUFFIX = ".packed"
MAX_ENTRIES = 12  # the most recently used are kept; each is as large as its model, or a component of a pipeline
MIN_FREE_BYTES = 1 << 30  # left on the disk after an entry is written: a full home directory breaks other things
SAMPLE_BLOCKS = 64  # compared at each start: 64 MiB, 40 ms
ABANDONED_S = 3600.0  # a .partial file not written to for this long was left by a process that died

_MARK = b"tilewpk\x01"
_DIGEST_BYTES = 32
_FOOTER_BYTES = len(_MARK) + 8 + _DIGEST_BYTES  # mark, offset of the header, its digest
_CHUNK_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000  # a model of 1 TB has 20 MB of checksums
_POPULATE_READ = 22  # Linux 5.14's MADV_POPULATE_READ, which Python does not name

_log = logging.getLogger(__name__)


class _NoEntryError(Exception):
    """A file is not a valid entry; the message says why."""


class PackedCache:
    """The entry of one model from one checkpoint, in `folder`."""

    def __init__(
        self,
        folder: Path,
        weights: Sequence[Weight],
        checkpoint: Path,
        fingerprint: str,
        dtype: torch.dtype,
        recipe: str,
    ) -> None:
        """Take the path of the `checkpoint`, the `fingerprint` of its state, and a `recipe` of all other inputs."""
        self._folder = folder
        self._weights = weights
        recipes = (weight.recipe for weight in weights)
        # Plain tensors depend on the dtype, packed ones on the format in which this ISA level packs it.
        self._key = _key(fingerprint, str(dtype), repr(weight_format(dtype)), recipe, *recipes)
        # Two parts, so that older states of the same checkpoint can be found.
        self._checkpoint = hashlib.sha256(os.fsencode(checkpoint.resolve())).hexdigest()[:16]
        self._state = _key(fingerprint)[:16]
        self.path = folder / f"{self._checkpoint}-{self._state}-{self._key[:16]}{SUFFIX}"
        self._why_unused: str | None = None  # why `restore` could not use the file
        self.unchecked: ChecksummedData | None = None  # mapped by `restore`, compared only in part

    def restore(self, on_bytes: Callable[[int], object], is_streamed: bool = False) -> bool:
        """Give every weight its value from the entry; return False and change nothing if there is none to use.

        `on_bytes` is called as the file is read into memory; `is_streamed`: it is read only as layers are used.
        """
        try:
            values = self._read(on_bytes, is_streamed)
        except (_NoEntryError, CheckpointError) as error:
            self._why_unused = str(error)
            return False
        for weight, value in zip(self._weights, values, strict=True):
            weight.restore(value)
        try:
            os.utime(self.path)  # marks it as the most recently used
        except OSError as error:
            _log.debug("the time of %s stays as it is: %s", self.path, error)
        return True

    def stored_bytes(self) -> int | None:
        """Return the size of the entry's file; None if there is none, or something else has its name.

        `store` meets the same obstacle, such as another user's folder: one warning is enough.
        """
        try:
            status = os.stat(self.path)
        except OSError as error:
            _log.debug("no packed weights are read from %s: %s", self.path, error)
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _read(self, on_bytes: Callable[[int], object], is_streamed: bool) -> list[object]:
        entry, data = _open(self.path)
        if entry["key"] != self._key:
            raise _NoEntryError("it belongs to another model")
        if not is_streamed:
            _populate(data.file, on_bytes)
        num_blocks = len(data.checksums)
        # Other blocks at each start: short runs, which end before a full check, also find damage in the end.
        _compare(data, random.sample(range(num_blocks), min(num_blocks, SAMPLE_BLOCKS)))
        if is_streamed:
            data.file.release(0, data.file.size_bytes)  # a full check would read again what was released
        else:
            self.unchecked = data if num_blocks > SAMPLE_BLOCKS else None
        try:
            return [decode(value, data.file) for value in entry["values"]]
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError) as error:
            raise _NoEntryError(f"its header describes no weights: {error!r}") from error

    def store(self) -> None:
        """Write the weights' values as the entry, and remove the entries it replaces; log a warning if it cannot."""
        encoder = ValueEncoder()
        values = [encoder.encode(weight.value) for weight in self._weights]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_old()
            self._write(values, encoder)
        except OSError as error:
            unused = "" if self._why_unused is None else f", nor read from there ({self._why_unused})"
            _log.warning(
                "packed weights are not cached in %s (%s)%s, so the next start packs them again: TILEWRIGHT_CACHE_DIR "
                "names another folder, or off",
                self._folder,
                error.strerror or error,
                unused,
            )
        else:
            if self._why_unused is not None:
                _log.warning("%s is not used and is replaced: %s", self.path, self._why_unused)

    def _write(self, values: list[object], encoder: ValueEncoder) -> None:
        data_bytes = encoder.size_bytes
        free_bytes = shutil.disk_usage(self._folder).free
        if data_bytes + MIN_FREE_BYTES > free_bytes:
            raise OSError(
                f"it takes {data_bytes / 1e9:.1f} GB and leaves {MIN_FREE_BYTES / 1e9:.1f} GB free, "
                f"but only {free_bytes / 1e9:.1f} GB are"
            )
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=self.path.stem, suffix=".partial")
        try:
            with os.fdopen(descriptor, "wb") as file:
                writer = ChecksummedWriter(file)
                for offset, tensor in encoder.tensors:
                    writer.pad_to(offset)
                    _write_tensor(writer, tensor)
                entry = {"key": self._key, "data_bytes": data_bytes, "checksums": writer.checksums, "values": values}
                header = json.dumps(entry).encode()
                file.write(header + _MARK + data_bytes.to_bytes(8, "little") + hashlib.sha256(header).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        with contextlib.suppress(OSError):  # the entry exists, though perhaps not after a power failure
            _sync_folder(self._folder)

    def _remove_old(self) -> None:
        """Remove older states of this checkpoint, the least recently used entries beyond MAX_ENTRIES, and leftovers."""
        times_ns = _times_ns(self._folder, SUFFIX)
        times_ns.pop(self.path, None)
        stale = [path for path in times_ns if self._is_older_state(path)]
        current = sorted(times_ns.keys() - set(stale), key=lambda path: times_ns[path], reverse=True)
        abandoned_before_ns = time.time_ns() - int(ABANDONED_S * 1e9)
        partial = _times_ns(self._folder, ".partial")
        remains = [path for path, time_ns in partial.items() if time_ns < abandoned_before_ns]
        for path in [*stale, *current[MAX_ENTRIES - 1 :], *remains]:
            _log.info("removing %s", path)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # another user's, in a shared folder
                _log.debug("%s stays: %s", path, error)

    def _is_older_state(self, path: Path) -> bool:
        parts = path.stem.split("-")
        return len(parts) == 3 and parts[0] == self._checkpoint and parts[1] != self._state


def entries(folder: Path) -> list[Path]:
    """Return the files of all models, the most recently used first."""
    times_ns = _times_ns(folder, SUFFIX)
    return sorted(times_ns, key=lambda path: times_ns[path], reverse=True)


def _times_ns(folder: Path, suffix: str) -> dict[Path, int]:
    """Return when the files with this suffix were written, without those that are removed meanwhile."""
    times_ns = {}
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(OSError):
            times_ns[path] = path.stat().st_mtime_ns
    return times_ns


def find_damage(path: Path) -> str | None:
    """Return why a file is no entry, or where it was changed; None if it is as written. Reads all of it."""
    try:
        data = _open(path)[1]
        _compare(data, range(len(data.checksums)))
    except (_NoEntryError, CheckpointError) as error:
        return str(error)
    return None


def _open(path: Path) -> tuple[dict, ChecksummedData]:
    """Return an entry's header, and its data mapped but not read."""
    file = MappedFile(path)
    footer = file.memory[max(file.size_bytes - _FOOTER_BYTES, 0) :]
    if len(footer) < _FOOTER_BYTES or not footer.startswith(_MARK):
        raise _NoEntryError("its footer is missing: it is incomplete")
    header_begin = int.from_bytes(footer[len(_MARK) : -_DIGEST_BYTES], "little")
    if file.size_bytes - header_begin > MAX_HEADER_BYTES:
        raise _NoEntryError(f"its header has {file.size_bytes - header_begin} bytes, the limit is {MAX_HEADER_BYTES}")
    header = file.memory[header_begin : file.size_bytes - _FOOTER_BYTES]
    if hashlib.sha256(header).digest() != footer[-_DIGEST_BYTES:]:
        raise _NoEntryError("its header was changed")
    try:
        entry = json.loads(header)
        is_whole = entry["data_bytes"] == header_begin
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _NoEntryError(f"its header is not valid: {error!r}") from error
    if not is_whole:
        raise _NoEntryError("its header states another data length")
    if "checksums" not in entry:
        raise _NoEntryError("it has no checksums: another version wrote it")
    return entry, ChecksummedData(file, header_begin, entry["checksums"])


def _compare(data: ChecksummedData, blocks: Iterable[int]) -> None:
    damaged = data.first_damaged(blocks)
    if damaged is not None:
        begin = damaged * BLOCK_BYTES
        raise _NoEntryError(f"bytes {begin} to {begin + BLOCK_BYTES} were changed after they were written")


def _key(*parts: str) -> str:
    """Return a name for what an entry's bytes depend on: the version of this format, and `parts`."""
    return hashlib.sha256("\n".join([str(LAYOUT_VERSION), *parts]).encode()).hexdigest()


def _write_tensor(writer: ChecksummedWriter, tensor: Tensor) -> None:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    for begin in range(0, len(data), _CHUNK_BYTES):
        writer.write(data[begin : begin + _CHUNK_BYTES].data)


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that the new name is on disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _populate(file: MappedFile, on_bytes: Callable[[int], object]) -> None:
    """Read the file into memory, in huge pages if the file system has them, so that no token waits for a page.

    A file larger than the free memory would evict its own beginning: it is read ahead as it is used, front to back.
    """
    if file.size_bytes > memory.available_bytes():
        file.memory.madvise(mmap.MADV_SEQUENTIAL)
        _log.warning(
            "%s has %.1f GB, more than the memory that is free: it is read from the disk again in every pass",
            file.path,
            file.size_bytes / 1e9,
        )
        on_bytes(file.size_bytes)
        return
    advice = _POPULATE_READ
    try:
        file.memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without huge pages
        _log.debug("%s is mapped in small pages: %s", file.path, error)
    for begin in range(0, file.size_bytes, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, file.size_bytes - begin)
        try:
            file.memory.madvise(advice, begin, length)
        except OSError as error:
            if advice == mmap.MADV_WILLNEED:
                raise _NoEntryError(f"it cannot be read: {error}") from error
            advice = mmap.MADV_WILLNEED  # before Linux 5.14: pages are read when touched
            _log.debug("%s is read ahead only: %s", file.path, error)
        on_bytes(length)


BYTES_PER_S = 200e6
_LOWEST_PRIORITY = 19


class DamagedEntryError(RuntimeError):
    """Weights in use differ from those that were packed. Their file is removed: the next start packs them again."""


class EntryCheck:
    """A thread that compares a whole entry with its checksums.

    On damage it removes the file, calls `on_damage`, and raises the error: a process that ends with its threads (the
    server's engine) is restarted, and packs again.
    """

    def __init__(
        self, data: ChecksummedData, on_damage: Callable[[DamagedEntryError], object] = lambda error: None
    ) -> None:
        self._data = data
        self._on_damage = on_damage
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the check, complete or not."""
        self._is_closing.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until all is compared."""
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # not permitted: then only the pauses keep it slow
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for block in range(len(self._data.checksums)):
            if self._data.first_damaged([block]) is not None:
                self._fail(block)
            if self._is_closing.wait(BLOCK_BYTES / BYTES_PER_S):
                return
        _log.debug("%s is as it was written", self._data.file.path)

    def _fail(self, block: int) -> None:
        path = self._data.file.path
        begin = block * BLOCK_BYTES
        error = DamagedEntryError(
            f"{path} was damaged after it was written, in bytes {begin} to {begin + BLOCK_BYTES}: answers of this "
            "process may be wrong. The file is removed; the next start packs the weights anew"
        )
        _log.error("%s", error)
        with contextlib.suppress(OSError):  # a read-only folder: the next start's check finds the damage again
            path.unlink()
        self._on_damage(error)
        raise error
