"""The output of a batch: one line per request, appended to across interrupted runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from tilewright.host import files
from tilewright.server.http.bodies import to_json
from tilewright.types import RequestError

SYNC_INTERVAL_S = 5.0
MAX_LINE_BYTES = 1 << 30  # of a resumed file: log-probabilities of a long context take half of it
_PIECE_BYTES = 1 << 16
_ZEROS = bytes(_PIECE_BYTES)
# Line ends of Python's splitlines, with which many read such files; JSON escapes the others.
_LINE_ENDS = "\x85\u2028\u2029"
_BEGINNING = b'{"id":"batch_req_'  # of each line


class ResultEntry(NamedTuple):
    """A line of the output."""

    line_number: int
    offset: int
    is_damaged: bool = False  # by a power failure; the fields below are unknown
    custom_id: str = ""
    id: str = ""
    status: int = 0
    model: str | None = None  # that generated the answer


def record(custom_id: str, id: str, request_id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the output, in OpenAI's format."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": id, "custom_id": custom_id, "response": response, "error": None}


class ResultFile:
    """Lines in a file, to which one process at a time appends.

    A killed process leaves an incomplete last line at worst. A power failure may lose data since the last sync, or fill
    it with zeros. `entries` and `remove` repair both when the batch is resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _open_locked(path)
        self._size_bytes = os.fstat(self._descriptor).st_size
        self._synced_s = time.monotonic()
        _sync_folder(path.parent)

    def close(self) -> None:
        os.close(self._descriptor)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, completely or not at all; sync every SYNC_INTERVAL_S."""
        text = to_json(line)
        for character in _LINE_ENDS:
            text = text.replace(character.encode(), f"\\u{ord(character):04x}".encode())
        data = memoryview(text + b"\n")
        size_bytes = self._size_bytes + len(data)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, self._size_bytes)
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error
        self._size_bytes = size_bytes
        if time.monotonic() - self._synced_s > SYNC_INTERVAL_S:
            self.sync()

    def sync(self) -> None:
        """Wait until the lines are on disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error
        self._synced_s = time.monotonic()

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._size_bytes = 0

    def entries(self) -> Iterator[ResultEntry]:
        """Yield the lines; remove an incomplete last one. Raise RequestError if the file is not a batch's output."""
        offset = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for line_number, (line, size_bytes) in enumerate(self._lines(file), 1):
                if not line.endswith(b"\n") and _is_incomplete(line):
                    os.ftruncate(self._descriptor, offset)
                    self._size_bytes = offset
                    return
                yield self._entry(line_number, offset, line)
                offset += size_bytes

    def remove(self, offsets: Sequence[int]) -> None:
        """Remove the lines at these ascending offsets; a copy without them replaces the file atomically."""
        path = self.path.with_name(f".{self.path.name}.new")
        descriptor = _open_locked(path)
        removed = iter([*offsets, -1])
        next_removed, offset = next(removed), 0
        with open(self._descriptor, "rb", closefd=False) as old, open(descriptor, "wb", closefd=False) as new:
            os.ftruncate(descriptor, 0)
            old.seek(0)
            is_removed, ends_line = False, True
            while piece := old.readline(_PIECE_BYTES):
                if ends_line and (is_removed := offset == next_removed):
                    next_removed = next(removed)
                if not is_removed:
                    new.write(piece)
                offset += len(piece)
                ends_line = piece.endswith(b"\n")
        os.fchmod(descriptor, os.fstat(self._descriptor).st_mode & 0o777)
        os.fsync(descriptor)
        os.replace(path, self.path)
        _sync_folder(path.parent)
        os.close(self._descriptor)
        self._descriptor, self._size_bytes = descriptor, os.fstat(descriptor).st_size

    def _lines(self, file: BufferedReader) -> Iterator[tuple[bytes, int]]:
        """Yield each line and its size in the file.

        Long runs of zeros are shortened: after a power failure, or in a sparse file, there may be gigabytes.
        """
        line, size_bytes, line_number = bytearray(), 0, 1
        while piece := file.readline(_PIECE_BYTES):
            size_bytes += len(piece)
            if size_bytes > MAX_LINE_BYTES:
                raise RequestError(
                    f"{self.path}, line {line_number}: more than {MAX_LINE_BYTES} bytes, which no line of a batch's "
                    "output has; choose another OUT, or --restart to start over"
                )
            if line[-1:] != b"\0" or piece != _ZEROS:
                line += piece
            if piece.endswith(b"\n"):
                yield bytes(line), size_bytes
                line, size_bytes, line_number = bytearray(), 0, line_number + 1
        if line:
            yield bytes(line), size_bytes

    def _entry(self, line_number: int, offset: int, line: bytes) -> ResultEntry:
        # JSON has no zero bytes; blocks lost in a power failure read as zeros.
        if b"\0" in line and offset:
            return ResultEntry(line_number, offset, is_damaged=True)
        try:
            fields = json.loads(line)
            status, body = fields["response"]["status_code"], fields["response"]["body"]
            model = body.get("model") if status == 200 else None
            return ResultEntry(line_number, offset, False, str(fields["custom_id"]), str(fields["id"]), status, model)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            message = f"{self.path}, line {line_number}: it is not a line of a batch's output; --restart starts over"
            raise RequestError(message) from error


class Results:
    """The files for answers and failures, which may be the same."""

    def __init__(self, answers: Path, failures: Path | None) -> None:
        self._answers = ResultFile(answers)
        try:
            self._failures = self._answers if failures is None else ResultFile(failures)
        except BaseException:
            self._answers.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    @property
    def _files(self) -> list[ResultFile]:
        return list(dict.fromkeys([self._answers, self._failures]))

    def entries(self, *, drops_failed: bool) -> Iterator[tuple[Path, ResultEntry]]:
        """Yield the lines of earlier runs; remove damaged lines and, with `drops_failed`, failures from the files."""
        for file in self._files:
            removed = array("q")
            for entry in file.entries():
                if entry.is_damaged or (drops_failed and entry.status != 200):
                    removed.append(entry.offset)
                else:
                    yield file.path, entry
            if removed:
                file.remove(removed)

    def append(self, line: Mapping[str, Any]) -> None:
        is_answer = line["response"]["status_code"] == 200
        (self._answers if is_answer else self._failures).append(line)

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def clear(self) -> None:
        for file in self._files:
            file.clear()


def _is_incomplete(line: bytes) -> bool:
    """Return whether this may be the beginning of a batch's line; other files are not changed."""
    beginning = line.rstrip(b"\0")
    return beginning.startswith(_BEGINNING) or _BEGINNING.startswith(beginning)


def _sync_folder(folder: Path) -> None:
    """Wait until new file names in a folder are on disk, if its file system supports that."""
    with contextlib.suppress(OSError):  # a folder may be writable but not readable
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Open a regular file for appending and reading, locked against other batches."""
    while True:
        try:
            if files.exists(path):
                files.check_regular(path, os.stat(path))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        try:
            files.check_regular(path, os.fstat(descriptor))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have replaced the file at this path meanwhile.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise RequestError(f"{path} is being written by another batch") from None
        except OSError as error:
            os.close(descriptor)
            raise RequestError(f"{path} cannot be locked: {error.strerror}") from error
        os.close(descriptor)
