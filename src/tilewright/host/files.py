"""Files of users, downloads and caches: read only if they are regular and within a limit, written without a wait.

Anything may stand under a name: a pipe that nobody writes to, a device without an end, a sparse file of terabytes. So
every file that is read is opened here. A refusal is an OSError whose `strerror` names what the file is, or its size and
the limit: callers report it as they report a file that the system does not open. A file of a checkpoint is refused by
a `CheckpointError`.
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

MAX_TEXT_BYTES = 256 << 20  # of a text or a set of questions that a command reads whole
MAX_PROMPT_CHARACTERS = 16 << 20  # from standard input: ten times what the longest context holds

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class FileRefused(OSError):
    """A file that is not read, though the system would: `strerror` says why."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


def exists(path: str | Path) -> bool:
    """Whether anything has this name, or might: a folder that may not be searched is an error when the file is opened.

    `Path.exists` raises there, and `Path.is_file` calls a pipe or a folder absent that stands where a file should be.
    """
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def open_regular(path: str | Path, limit_bytes: int | None = None) -> BufferedReader:
    """Open a regular file of at most `limit_bytes`; FileRefused for anything else, at once."""
    try:
        check_regular(path, os.stat(path), limit_bytes)  # before it is opened: that alone has effects on some devices
        # What has taken the file's place meanwhile must not block either.
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
    """FileRefused for what is no regular file, or one of more than `limit_bytes`."""
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(path, f"it is {kind_of(status)}, expected a regular file")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise FileRefused(path, f"it has {status.st_size} bytes, the limit is {limit_bytes}")


def kind_of(status: os.stat_result) -> str:
    """What a file is, in words: "a directory"."""
    return next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a regular file")


def read_bytes(path: str | Path, limit_bytes: int) -> bytes:
    """The bytes of a regular file; OSError if it cannot be read or has more than `limit_bytes`."""
    with open_regular(path, limit_bytes) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = file.read(size_bytes + 1)
        if len(data) > size_bytes:  # it grows, or it is one of those of the kernel, which have no size
            data += file.read(limit_bytes + 1 - len(data))
        if len(data) > limit_bytes:
            raise FileRefused(path, f"it has more than {limit_bytes} bytes, the limit")
    return data


def read_standard_input() -> str:
    """The text of standard input without spaces around it; RequestError if it is too long, or none."""
    if sys.stdin is None:
        raise RequestError("standard input is closed, expected a prompt there")
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
    """Return `text`; RequestError if it stands for bytes that are not UTF-8, as Python's surrogates do."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not UTF-8, from character {error.start + 1} on") from error
    return text


def check_output(path: Path, flag: str) -> None:
    """RequestError for a file that could not be written, before the work whose result goes there.

    A regular file, a pipe that somebody reads and a character device such as /dev/stdout or /dev/null are outputs; a
    disk is not.
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
    """Write an output that `check_output` allows; RequestError if the system refuses, or nobody reads the pipe."""
    try:
        # Non-blocking: the system would wait for a reader else, for ever if there is none.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        with open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
            os.set_blocking(file.fileno(), True)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        reason = "it is a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror or str(error)
        raise RequestError(f"{path} cannot be written: {reason}") from error


MAX_JSON_BYTES = 64 << 20  # an index of 140,000 tensors has 15 MB
MAX_VOCABULARY_BYTES = 256 << 20  # tokenizer.json, vocab.json, merges.txt: those of 260,000 tokens have 35 MB
MAX_TEMPLATE_BYTES = 4 << 20  # the longest chat templates have 30 KB

# What stands in for a file that was not really downloaded, or was renamed: how it begins, and what that is.
_BEGINNINGS = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"<!doctype html", "an HTML page, as a failed or refused download leaves it: download the file again"),
    (b"<html", "an HTML page, as a failed or refused download leaves it: download the file again"),
    (b"<?xml", "an XML document, as a failed or refused download leaves it: download the file again"),
    (b"gguf", "a GGUF file: name it with the ending .gguf"),
    (b"pk\x03\x04", "a ZIP archive, as pickled PyTorch weights are: get the safetensors of this model, or convert it"),
    (b"\x80\x02", "a pickle, which can run any code when opened: get the safetensors of this model, or convert it"),
    (b"\x1f\x8b", "compressed by gzip: unpack it"),
)
_BOM = b"\xef\xbb\xbf"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names the file, what is wrong with it and what to do."""


def foreign_kind(beginning: bytes) -> str | None:
    """What a file is that begins so, and what to do; None: nothing that is known to take a model file's place."""
    text = beginning[:256].removeprefix(_BOM).lstrip().lower()
    return next((kind for start, kind in _BEGINNINGS if text.startswith(start)), None)


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The bytes of a small file of a model; CheckpointError if it cannot be read or has more than `limit_bytes`."""
    try:
        return read_bytes(path, limit_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a model folder has config.json and safetensors") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_file(path: Path, limit_bytes: int) -> None:
    """CheckpointError where `read_file` would raise one, for a library that reads the file itself."""
    try:
        open_regular(path, limit_bytes).close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_template(path: Path) -> str:
    """The text of a chat template; CheckpointError if there is none."""
    data = read_file(path, MAX_TEMPLATE_BYTES)
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is {foreign_kind(data) or f'not UTF-8: {error}'}") from error


def read_json(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict:
    """The object in a JSON file; CheckpointError if there is none."""
    data = read_file(path, limit_bytes)
    try:
        value = json.loads(data.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is {_not_json(data, error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def read_optional_json(path: Path) -> dict:
    """The object in a JSON file, an empty one where there is no file."""
    return read_json(path) if exists(path) else {}


def _not_json(data: bytes, error: Exception) -> str:
    if not data:
        return "empty: download it again"
    return foreign_kind(data) or f"not JSON: {error}"
