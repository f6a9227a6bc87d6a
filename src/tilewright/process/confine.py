"""Takes rights away from this process, for good: memory, or all rights but computing, before untrusted input comes.

The filter of system calls is a program that the kernel runs before each call.
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
class Call:
    """A system call that stays, with its number on each architecture: None where there is no such call."""

    x86_64: int | None
    aarch64: int | None
    argument: int | None = None  # index of the argument that is compared
    values: tuple[int, ...] = ()  # what it may be


# Memory, clocks, and the files and sockets that are open already.
CALLS = {
    "read": Call(0, 63),
    "write": Call(1, 64),
    "close": Call(3, 57),
    "fstat": Call(5, 80),
    "poll": Call(7, None),  # aarch64 has neither poll nor select: the C library calls ppoll and pselect6
    "lseek": Call(8, 62),
    "mmap": Call(9, 222),
    "mprotect": Call(10, 226),
    "munmap": Call(11, 215),
    "brk": Call(12, 214),
    "rt_sigaction": Call(13, 134),
    "rt_sigprocmask": Call(14, 135),
    "rt_sigreturn": Call(15, 139),
    "pread64": Call(17, 67),
    "readv": Call(19, 65),
    "writev": Call(20, 66),
    "select": Call(23, None),
    "sched_yield": Call(24, 124),
    "mremap": Call(25, 216),
    "mincore": Call(27, 232),
    "madvise": Call(28, 233),
    "nanosleep": Call(35, 101),
    "setitimer": Call(38, 103),
    "getpid": Call(39, 172),
    "sendto": Call(44, 206),
    "recvfrom": Call(45, 207),
    "shutdown": Call(48, 210),
    "exit": Call(60, 93),
    "uname": Call(63, 160),
    "fcntl": Call(72, 25, 1, (1, 3, 1030)),  # F_GETFD, F_GETFL, F_DUPFD_CLOEXEC; others could send signals
    "gettimeofday": Call(96, 169),
    "getrlimit": Call(97, 163),
    "getrusage": Call(98, 165),
    "sysinfo": Call(99, 179),
    "times": Call(100, 153),
    "getuid": Call(102, 174),
    "getgid": Call(104, 176),
    "geteuid": Call(107, 175),
    "getegid": Call(108, 177),
    "sigaltstack": Call(131, 132),
    "gettid": Call(186, 178),
    "futex": Call(202, 98),
    "sched_getaffinity": Call(204, 123),
    "restart_syscall": Call(219, 128),
    "clock_gettime": Call(228, 113),
    "clock_getres": Call(229, 114),
    "clock_nanosleep": Call(230, 115),
    "exit_group": Call(231, 94),
    # AT_EMPTY_PATH alone: how the C library asks about an open file. A path, which no filter can look at, would tell
    # the size and the times of a file, never what is in it.
    "newfstatat": Call(262, 79, 3, (0x1000,)),
    "pselect6": Call(270, 72),
    "ppoll": Call(271, 73),
    "set_robust_list": Call(273, 99),
    "preadv": Call(295, 69),
    "prlimit64": Call(302, 261, 0, (0,)),  # its own limits alone
    "getcpu": Call(309, 168),
    "getrandom": Call(318, 278),
    "membarrier": Call(324, 283),
    "rseq": Call(334, 293),
}
# By the name that uname gives: what the kernel calls the architecture of a call (AUDIT_ARCH_*). The x32 calls of
# x86-64 have its name too, but numbers from 0x40000000 on, none of which is listed.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Of the kernel's packet filters, which judge calls here; both architectures are little-endian, so that the lower half
# of an argument of eight bytes comes first.
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in the kernel's struct seccomp_data


@cache
def numbers(machine: str) -> dict[str, int]:
    """The calls of CALLS that the architecture has, with their numbers."""
    found = {name: getattr(call, machine) for name, call in CALLS.items()}
    return {name: number for name, number in found.items() if number is not None}


def filter_program(machine: str) -> bytes | None:
    """A filter that allows CALLS; any other call fails as if the kernel did not know it, and one of another
    architecture ends the process. None where the machine, as uname names it, is of no known architecture.
    """
    if machine not in ARCHITECTURES:
        return None
    steps = [_step(_LOAD, _ARCH_AT), _step(_EQUAL, ARCHITECTURES[machine], if_so=1), _step(_RETURN, _KILL)]
    steps.append(_step(_LOAD, _NUMBER_AT))
    for name, number in numbers(machine).items():
        verdict = _verdict(CALLS[name])
        steps += [_step(_EQUAL, number, if_not=len(verdict)), *verdict]
    return b"".join([*steps, _step(_RETURN, _REFUSE)])


def _verdict(call: Call) -> list[bytes]:
    if call.argument is None:
        return [_step(_RETURN, _ALLOW)]
    steps = [_step(_LOAD, _ARGUMENTS_AT + 8 * call.argument)]
    for value in call.values:
        steps += [_step(_EQUAL, value, if_not=1), _step(_RETURN, _ALLOW)]
    return [*steps, _step(_RETURN, _REFUSE)]


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction, which skips `if_so` or `if_not` steps where it compares."""
    return struct.pack("=HBBI", code, if_so, if_not, value)


_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_MAX_OPEN_FILES = 32


def confine(memory_bytes: int) -> list[str]:
    """Confines this process, which must have one thread; returns the names of what the system could not do.

    `memory_bytes` may be used beyond what is mapped now. From here on no file, socket or process can be opened.
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
    """Let this process map no more than that, and leave no dump of it when it ends by that."""
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)


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
    program = filter_program(platform.machine())
    if program is None:
        return False
    # struct sock_fprog: the count of instructions, and where they are.
    instructions = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(table), 0, 0) == 0
