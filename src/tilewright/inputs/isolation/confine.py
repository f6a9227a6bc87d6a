"""Takes all rights but computing away from this process, for good, before it decodes untrusted media."""

from __future__ import annotations

import ctypes
import platform
import resource
import struct
from pathlib import Path

from tilewright.inputs.isolation import seccomp

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_MAX_OPEN_FILES = 32


def confine(memory_bytes: int) -> list[str]:
    """Confines this process, which must have one thread; returns the names of what the system could not do.

    `memory_bytes` may be used beyond what is mapped now. From here on no file, socket or process can be opened.
    """
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, mapped_bytes + memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _limit(resource.RLIMIT_NPROC, 0)
    missing = []
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        missing.append("dumpable")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        missing.append("no_new_privs")
    if not _filter_calls(libc):
        missing.append("seccomp")
    return missing


def limit_cpu(seconds: float) -> None:
    """Lets this process compute for as long from now; the system ends it then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until_s, hard = int(used.ru_utime + used.ru_stime + seconds) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(until_s, hard), hard))


def _limit(what: int, most: int) -> None:
    most = _at_most(most, resource.getrlimit(what)[1])
    resource.setrlimit(what, (most, most))


def _at_most(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Whether the filter is in place: not where its architecture is unknown, or the kernel knows no filters."""
    program = seccomp.program(platform.machine())
    if program is None:
        return False
    # struct sock_fprog: the count of instructions, and where they are.
    instructions = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(table), 0, 0) == 0
