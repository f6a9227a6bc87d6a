"""The output of a batch: a line for each request that is done, and what a run that was cut short left of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilewright.server.json_text import to_json
from tilewright.types import RequestError

SYNC_INTERVAL_S = 5.0
# To Python's splitlines, which many read such files with, these end a line; JSON escapes the others that do.
_LINE_ENDS = "\x85\u2028\u2029"
_BEGINNING = b'{"id":"batch_req_'  # of every line


class Entry(NamedTuple):
    """A line that was read back."""

    line_number: int
    offset: int
    is_damaged: bool = False  # by a power cut: the rest is unknown
    custom_id: str = ""
    id: str = ""
    status: int = 0
    model: str | None = None  # that answered


def record(custom_id: str, id: str, request_id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the output, as OpenAI has it."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": id, "custom_id": custom_id, "response": response, "error": None}


class ResultFile:
    """Lines in a file that one process at a time appends to.

    A process that is killed leaves what it wrote with the system, the last line torn at worst. A power cut may take, or
    blank out, what came after the last sync. DraftInput the file back mends both.
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
        """Adds a line, whole or not at all; now and then waits until the disk has it."""
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
        """Waits until what was added would survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error.strerror}") from error
        self._synced_s = time.monotonic()

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._size_bytes = 0

    def entries(self) -> Iterator[Entry]:
        """What the file has, line by line; a torn last line is cut off. RequestError for a file that is not ours."""
        offset = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for line_number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and _is_torn(line):
                    os.ftruncate(self._descriptor, offset)
                    self._size_bytes = offset
                    return
                yield self._entry(line_number, offset, line)
                offset += len(line)

    def remove(self, offsets: Sequence[int]) -> None:
        """Takes out the lines that begin there, in ascending order; a copy without them replaces the file at once."""
        path = self.path.with_name(f".{self.path.name}.new")
        descriptor = _open_locked(path)
        removed = iter([*offsets, -1])
        next_removed, offset = next(removed), 0
        with open(self._descriptor, "rb", closefd=False) as old, open(descriptor, "wb", closefd=False) as new:
            os.ftruncate(descriptor, 0)
            old.seek(0)
            for line in old:
                if offset == next_removed:
                    next_removed = next(removed)
                else:
                    new.write(line)
                offset += len(line)
        os.fchmod(descriptor, os.fstat(self._descriptor).st_mode & 0o777)
        os.fsync(descriptor)
        os.replace(path, self.path)
        _sync_folder(path.parent)
        os.close(self._descriptor)
        self._descriptor, self._size_bytes = descriptor, os.fstat(descriptor).st_size

    def _entry(self, line_number: int, offset: int, line: bytes) -> Entry:
        # JSON has no zero bytes; blocks that a power cut kept from the disk have nothing else.
        if b"\0" in line and offset:
            return Entry(line_number, offset, is_damaged=True)
        try:
            fields = json.loads(line)
            status, body = fields["response"]["status_code"], fields["response"]["body"]
            model = body.get("model") if status == 200 else None
            return Entry(line_number, offset, False, str(fields["custom_id"]), str(fields["id"]), status, model)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            message = f"{self.path}, line {line_number}: it is no line of a batch's output; --restart begins anew"
            raise RequestError(message) from error


class Results:
    """Where answers go, and failures too unless they have a file of their own."""

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

    def entries(self, *, drops_failed: bool) -> Iterator[tuple[Path, Entry]]:
        """What an earlier run left. Damaged lines and, if so wished, failures are taken out of their files instead."""
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


def _is_torn(line: bytes) -> bool:
    """Whether it can be the beginning of one of our lines; another's file is better left alone."""
    beginning = line.rstrip(b"\0")
    return beginning.startswith(_BEGINNING) or _BEGINNING.startswith(beginning)


def _sync_folder(folder: Path) -> None:
    """Waits until the names in it would survive a power cut, where its file system can tell."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _open_locked(path: Path) -> int:
    """A descriptor that appends to the file, which no other process has so opened."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that another process replaced in the meantime is not the one at this path any more.
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
