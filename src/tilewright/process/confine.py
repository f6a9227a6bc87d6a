"""Permanently limits this process's memory, or all its rights except computing, before it reads untrusted input.

The kernel runs the filter of system calls, a small program, before each call.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class SystemCall:
    """An allowed system call with its number on each architecture; None where the call does not exist."""

    x86_64: int | None
    aarch64: int | None
    argument: int | None = None  # index of the argument that is compared
    values: tuple[int, ...] = ()  # allowed values


# Memory, clocks, and files and sockets that are already open.
CALLS = {
    "read": SystemCall(0, 63),
    "write": SystemCall(1, 64),
    "close": SystemCall(3, 57),
    "fstat": SystemCall(5, 80),
    "poll": SystemCall(7, None),  # aarch64 has neither poll nor select: the C library calls ppoll and pselect6
    "lseek": SystemCall(8, 62),
    "mmap": SystemCall(9, 222),
    "mprotect": SystemCall(10, 226),
    "munmap": SystemCall(11, 215),
    "brk": SystemCall(12, 214),
    "rt_sigaction": SystemCall(13, 134),
    "rt_sigprocmask": SystemCall(14, 135),
    "rt_sigreturn": SystemCall(15, 139),
    "pread64": SystemCall(17, 67),
    "readv": SystemCall(19, 65),
    "writev": SystemCall(20, 66),
    "select": SystemCall(23, None),
    "sched_yield": SystemCall(24, 124),
    "mremap": SystemCall(25, 216),
    "mincore": SystemCall(27, 232),
    "madvise": SystemCall(28, 233),
    "nanosleep": SystemCall(35, 101),
    "setitimer": SystemCall(38, 103),
    "getpid": SystemCall(39, 172),
    "sendto": SystemCall(44, 206),
    "recvfrom": SystemCall(45, 207),
    "shutdown": SystemCall(48, 210),
    "exit": SystemCall(60, 93),
    "uname": SystemCall(63, 160),
    "fcntl": SystemCall(72, 25, 1, (1, 3, 1030)),  # F_GETFD, F_GETFL, F_DUPFD_CLOEXEC; others could send signals
    "gettimeofday": SystemCall(96, 169),
    "getrlimit": SystemCall(97, 163),
    "getrusage": SystemCall(98, 165),
    "sysinfo": SystemCall(99, 179),
    "times": SystemCall(100, 153),
    "getuid": SystemCall(102, 174),
    "getgid": SystemCall(104, 176),
    "geteuid": SystemCall(107, 175),
    "getegid": SystemCall(108, 177),
    "sigaltstack": SystemCall(131, 132),
    "gettid": SystemCall(186, 178),
    "futex": SystemCall(202, 98),
    "sched_getaffinity": SystemCall(204, 123),
    "restart_syscall": SystemCall(219, 128),
    "clock_gettime": SystemCall(228, 113),
    "clock_getres": SystemCall(229, 114),
    "clock_nanosleep": SystemCall(230, 115),
    "exit_group": SystemCall(231, 94),
    # Only with AT_EMPTY_PATH, as the C library queries an open file. A filter cannot see paths, with which the call
    # would reveal the size and the times of a file, but not its contents.
    "newfstatat": SystemCall(262, 79, 3, (0x1000,)),
    "pselect6": SystemCall(270, 72),
    "ppoll": SystemCall(271, 73),
    "set_robust_list": SystemCall(273, 99),
    "preadv": SystemCall(295, 69),
    "prlimit64": SystemCall(302, 261, 0, (0,)),  # only its own limits
    "getcpu": SystemCall(309, 168),
    "getrandom": SystemCall(318, 278),
    "membarrier": SystemCall(324, 283),
    "rseq": SystemCall(334, 293),
}
# uname's name -> the kernel's number of the architecture (AUDIT_ARCH_*). x32 calls have the number of x86-64, but call
# numbers from 0x40000000 on, none of which is listed.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Instructions of the kernel's packet filters, which also filter calls. Both architectures are little-endian: the lower
# half of an eight-byte argument comes first.
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in the kernel's struct seccomp_data


@cache
def numbers(machine: str) -> dict[str, int]:
    """Return the calls of CALLS that the architecture has, with their numbers."""
    found = {name: getattr(call, machine) for name, call in CALLS.items()}
    return {name: number for name, number in found.items() if number is not None}


def filter_program(machine: str) -> bytes | None:
    """Return a filter that allows CALLS; None for an unknown architecture.

    `machine` is uname's name. Other calls fail as if the kernel did not have them; a call of another architecture ends
    the process.
    """
    if machine not in ARCHITECTURES:
        return None
    steps = [_step(_LOAD, _ARCH_AT), _step(_EQUAL, ARCHITECTURES[machine], if_so=1), _step(_RETURN, _KILL)]
    steps.append(_step(_LOAD, _NUMBER_AT))
    for name, number in numbers(machine).items():
        verdict = _verdict(CALLS[name])
        steps += [_step(_EQUAL, number, if_not=len(verdict)), *verdict]
    return b"".join([*steps, _step(_RETURN, _REFUSE)])


def _verdict(call: SystemCall) -> list[bytes]:
    if call.argument is None:
        return [_step(_RETURN, _ALLOW)]
    steps = [_step(_LOAD, _ARGUMENTS_AT + 8 * call.argument)]
    for value in call.values:
        steps += [_step(_EQUAL, value, if_not=1), _step(_RETURN, _ALLOW)]
    return [*steps, _step(_RETURN, _REFUSE)]


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    """Return one instruction; a comparison skips `if_so` or `if_not` instructions."""
    return struct.pack("=HBBI", code, if_so, if_not, value)


_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_MAX_OPEN_FILES = 32


def confine(memory_bytes: int) -> list[str]:
    """Confine this process, which must have one thread; return the names of protections that the system lacks.

    It may use `memory_bytes` beyond the memory mapped now. After this call it can open no file, socket or process.
    """
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_memory(mapped_bytes + memory_bytes)
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


def limit_memory(memory_bytes: int) -> None:
    """Limit the memory that this process maps, and disable core dumps."""
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)


def limit_cpu(seconds: float) -> None:
    """Let the system end this process after this many more CPU seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until_s, hard = int(used.ru_utime + used.ru_stime + seconds) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(until_s, hard), hard))


def _limit(what: int, most: int) -> None:
    most = _at_most(most, resource.getrlimit(what)[1])
    resource.setrlimit(what, (most, most))


def _at_most(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _filter_calls(libc: ctypes.CDLL) -> bool:
    """Install the filter; return False if the architecture is unknown or the kernel does not support filters."""
    program = filter_program(platform.machine())
    if program is None:
        return False
    # struct sock_fprog: the number of instructions, and their address.
    instructions = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(table), 0, 0) == 0
