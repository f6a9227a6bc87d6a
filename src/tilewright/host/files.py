"""Reads files of users, downloads and caches if they are regular and within a limit; writes without blocking.

A path may name anything: a pipe without a writer, an endless device, a sparse file of terabytes. So every file that is
read is opened here. A refusal is an OSError whose `strerror` has the kind of the file, or its size and the limit, so
that callers report it like a file that the system does not open. Files of checkpoints raise CheckpointError.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path

from tilewright.types import RequestError

MAX_TEXT_BYTES = 256 << 20  # of a text or a set of questions that a command reads
MAX_PROMPT_CHARACTERS = 16 << 20  # from standard input: ten times the longest context

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class FileRefused(OSError):
    """A file is refused that the system would open; `strerror` is the reason."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


def exists(path: str | Path) -> bool:
    """Return whether the path exists; True too if its folder may not be searched, which opening then reports.

    `Path.exists` raises in that case, and `Path.is_file` is false for a pipe or a folder in place of a file.
    """
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def open_regular(path: str | Path, limit_bytes: int | None = None) -> BufferedReader:
    """Open a regular file of at most `limit_bytes`; raise FileRefused for anything else, without blocking."""
    try:
        check_regular(path, os.stat(path), limit_bytes)  # before opening, which has effects on some devices
        # Non-blocking, in case the file was replaced meanwhile.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:
        raise FileRefused(repr(str(path)), "it is not a path") from error
    try:
        check_regular(path, os.fstat(descriptor), limit_bytes)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | Path, status: os.stat_result, limit_bytes: int | None = None) -> None:
    """Raise FileRefused for a file that is not regular, or has more than `limit_bytes`."""
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(path, f"it is {kind_of(status)}, expected a regular file")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise FileRefused(path, f"it has {status.st_size} bytes, the limit is {limit_bytes}")


def kind_of(status: os.stat_result) -> str:
    """Return the kind of a file as text: "a directory"."""
    return next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a regular file")


def read_bytes(path: str | Path, limit_bytes: int) -> bytes:
    """Return the bytes of a regular file; raise OSError if it cannot be read or has more than `limit_bytes`."""
    with open_regular(path, limit_bytes) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = file.read(size_bytes + 1)
        if len(data) > size_bytes:  # it grows, or is a file of the kernel, without a size
            data += file.read(limit_bytes + 1 - len(data))
        if len(data) > limit_bytes:
            raise FileRefused(path, f"it has more than {limit_bytes} bytes, the limit")
    return data


def read_standard_input() -> str:
    """Return the stripped text of standard input; raise RequestError if it is too long or not text."""
    if sys.stdin is None:
        raise RequestError("standard input is closed, expected a prompt")
    try:
        text = sys.stdin.read(MAX_PROMPT_CHARACTERS + 1)
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise RequestError(f"standard input has more than {MAX_PROMPT_CHARACTERS} characters, the limit of a prompt")
    return check_text(text, "standard input").strip()


def check_text(text: str, what: str) -> str:
    """Return `text`; raise RequestError if it has surrogates, with which Python represents bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not UTF-8, from character {error.start + 1} on") from error
    return text


def check_output(path: Path, flag: str) -> None:
    """Raise RequestError for an output that cannot be written, before the work on its contents.

    Outputs are regular files, pipes with a reader and character devices such as /dev/stdout or /dev/null, but not
    disks.
    """
    folder = path.parent
    if not os.path.isdir(folder):
        raise RequestError(f"{flag} is {path}, but there is no folder {folder}")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        fault = None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written to"
    except OSError as error:
        fault = error.strerror
    else:
        refused = stat.S_ISDIR(status.st_mode) or stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode)
        fault = f"it is {kind_of(status)}, expected the name of a file" if refused else None
        if fault is None and not os.access(path, os.W_OK):
            fault = "it may not be written to"
    if fault is not None:
        raise RequestError(f"{flag} is {path}, which cannot be written: {fault}")


def write_bytes(path: Path, data: bytes) -> None:
    """Write an output that `check_output` allows; raise RequestError if that fails, or a pipe has no reader."""
    try:
        # Non-blocking: otherwise opening a pipe waits for a reader, possibly for ever.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        with open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
            os.set_blocking(file.fileno(), True)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        reason = "it is a pipe without a reader" if error.errno == errno.ENXIO else error.strerror or str(error)
        raise RequestError(f"{path} cannot be written: {reason}") from error


MAX_JSON_BYTES = 64 << 20  # an index of 140,000 tensors has 15 MB
MAX_VOCABULARY_BYTES = 256 << 20  # tokenizer.json, vocab.json, merges.txt: 35 MB for 260,000 tokens
MAX_TEMPLATE_BYTES = 4 << 20  # the longest chat templates have 30 KB

# First bytes of files that are not models (Git LFS pointers, HTML error pages, renamed archives), with what to tell the
# user.
_BEGINNINGS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"<!doctype html", "an HTML page, probably of a failed or refused download: download the file again"),
    (b"<html", "an HTML page, probably of a failed or refused download: download the file again"),
    (b"<?xml", "an XML document, probably of a failed or refused download: download the file again"),
    (b"gguf", "a GGUF file: rename it to end in .gguf"),
    (b"pk\x03\x04", "a ZIP archive, such as pickled PyTorch weights: get the safetensors of this model, or convert it"),
    (b"\x80\x02", "a pickle, which can run any code when opened: get the safetensors of this model, or convert it"),
    (b"\x1f\x8b", "compressed by gzip: unpack it"),
)
_BOM = b"\xef\xbb\xbf"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file, its fault and what to do."""


def foreign_kind(beginning: bytes) -> str | None:
    """Return what a file with these first bytes is and what to do; None if it is none of the known wrong files."""
    text = beginning[:256].removeprefix(_BOM).lstrip().lower()
    return next((kind for start, kind in _BEGINNINGS if text.startswith(start)), None)


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return the bytes of a model's small file; raise CheckpointError if unreadable or larger than `limit_bytes`."""
    try:
        return read_bytes(path, limit_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model folder has config.json and safetensors") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_file(path: Path, limit_bytes: int) -> None:
    """Raise CheckpointError if `read_file` would, for a library that reads the file itself."""
    try:
        open_regular(path, limit_bytes).close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_template(path: Path) -> str:
    """Return the text of a chat template; raise CheckpointError if it cannot be read."""
    data = read_file(path, MAX_TEMPLATE_BYTES)
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is {foreign_kind(data) or f'not UTF-8: {error}'}") from error


def read_json(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict:
    """Return the object in a JSON file; raise CheckpointError if there is none."""
    data = read_file(path, limit_bytes)
    try:
        value = json.loads(data.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is {_not_json(data, error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def read_optional_json(path: Path) -> dict:
    """Return the object in a JSON file, or an empty one if the file does not exist."""
    return read_json(path) if exists(path) else {}


def _not_json(data: bytes, error: Exception) -> str:
    if not data:
        return "empty: download it again"
    return foreign_kind(data) or f"not JSON: {error}"
