"""Standard input, output and error of a command: closed ones, readers that leave, a full disk. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from tilewright.host import files

READER_LEFT = 141  # the exit status that shells give a program which SIGPIPE ended
PIPE_WAIT_S = 3.0


class OutputError(Exception):
    """Standard output accepts no more. No OSError, so that nothing takes it for an error of a file or a socket."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or error}")
        self.exit_status = READER_LEFT if error.errno == errno.EPIPE else 1


class _Stream:
    """A text stream whose other attributes are those of the stream it writes to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Output(_Stream):
    """Standard output that raises OutputError."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from error


class _Messages(_Stream):
    """Standard error that drops what cannot be written: a command goes on without its messages."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard the streams: at the end output is flushed, so that OutputError is raised here and not at Python's exit."""
    _open_closed()
    output, messages = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Output(output)), cast(TextIO, _Messages(messages))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError:
        _discard(output)
        raise
    finally:
        sys.stdout, sys.stderr = output, messages


def _open_closed() -> None:
    """Open the null device where a standard stream is closed: the next file or socket would get its number instead."""
    # Output is opened for reading, so that writing to it fails, as writing to a closed file does.
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _discard(output: TextIO) -> None:
    """Have Python's own flush at exit, which would print an error, write to the null device."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in a test
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)


def read_piped_input() -> str:
    """Return what a pipe or a file on standard input holds; nothing where it is neither, or a pipe stays silent."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):  # a stream without a file
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    # A program that starts this one may leave it a pipe that it never writes to and never closes.
    if not select.select([number], [], [], PIPE_WAIT_S)[0]:
        print(
            f"tilewright: nothing came from standard input within {PIPE_WAIT_S:g} s: going on without", file=sys.stderr
        )
        return ""
    return files.read_standard_input()
