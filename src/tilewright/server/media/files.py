"""Reads files of the server that requests name, from the folders of --allow-files only."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tilewright.types import RequestError


class FileError(RequestError):
    """Why a file was not read, without its path and the item's name."""


class FolderReader:
    """Reads regular files in the given folders; symbolic links and .. cannot lead out of them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise RequestError(f"files are to be read from {folder}, which is not a folder")
        self._given = [os.path.abspath(folder) for folder in folders]
        self._real = [os.path.realpath(folder) for folder in folders]

    def read(self, source: str, max_bytes: int) -> bytes:
        """The file at a path or a file: URL. FileError if it may not or cannot be read."""
        try:
            path = os.path.abspath(_path_of(source))
            # Checked before the disk is: errors must not reveal which other files exist.
            if not _is_within(path, [*self._given, *self._real]):
                raise _not_allowed()
            return self._read(path, max_bytes)
        except FileError:
            raise
        except (OSError, ValueError) as error:
            raise FileError(f"cannot be read: {getattr(error, 'strerror', None) or 'it is not a path'}") from None

    def _read(self, path: str, max_bytes: int) -> bytes:
        real = os.path.realpath(path)
        if not _is_within(real, self._real):
            raise _not_allowed()
        # Opening a pipe or a device could block or have effects.
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY)
        try:
            # A folder of the path may have become a link meanwhile: the path of the open file counts.
            if not _is_within(os.readlink(f"/proc/self/fd/{handle}"), self._real):
                raise _not_allowed()
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise FileError("it is not a regular file")
            if status.st_size > max_bytes:
                raise FileError(f"{status.st_size} bytes, the limit is {max_bytes}")
            with open(handle, "rb", closefd=False) as file:
                return file.read(max_bytes)
        finally:
            os.close(handle)


def _path_of(source: str) -> str:
    if not source.lower().startswith("file:"):
        return source
    parts = urlsplit(source)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise FileError("expected file:///PATH")
    return path


def _is_within(path: str, folders: Sequence[str]) -> bool:
    return any(os.path.commonpath([path, folder]) == folder for folder in folders)


def _not_allowed() -> FileError:
    return FileError("files are read only from folders given with --allow-files DIR")
