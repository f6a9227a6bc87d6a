"""Standard input, output and error of a command: handles closed streams, broken pipes, full disks. Imports no torch."""

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

READER_LEFT = 141  # shells' exit status of a program that SIGPIPE ended
PIPE_WAIT_S = 3.0


class OutputError(Exception):
    """Standard output cannot be written. Not an OSError, so that it is not handled as an error of a file or socket."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or error}")
        self.exit_status = READER_LEFT if error.errno == errno.EPIPE else 1


class _Stream:
    """A text stream that passes other attributes through to the stream it writes to."""

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
    """Standard error that drops messages which cannot be written, so that a command continues without them."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard the streams, and flush output at the end so that OutputError is raised here and not at Python's exit."""
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
    # Standard output is opened for reading, so that writing fails as for a closed file.
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
    """Redirect Python's flush at exit, which would print an error, to the null device."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in a test
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)


def read_piped_input() -> str:
    """Return the text of a pipe or a file on standard input; "" if it is neither, or the pipe stays silent."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):  # a stream without a file
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    # The parent process may have left a pipe that it never writes to and never closes.
    if not select.select([number], [], [], PIPE_WAIT_S)[0]:
        print(f"tilewright: no standard input within {PIPE_WAIT_S:g} s: continuing without", file=sys.stderr)
        return ""
    return files.read_standard_input()
