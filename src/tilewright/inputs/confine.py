"""A process gives up, for good, all but computing: it then works on what strangers send."""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
from pathlib import Path

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_MAX_OPEN_FILES = 32

# The calls that stay, by their numbers on x86-64: memory, clocks, and the files and sockets that are open already.
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
    "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20,
    "select": 23, "sched_yield": 24, "mremap": 25, "mincore": 27, "madvise": 28, "nanosleep": 35, "setitimer": 38,
    "getpid": 39, "sendto": 44, "recvfrom": 45, "shutdown": 48, "exit": 60, "uname": 63, "gettimeofday": 96,
    "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
    "getegid": 108, "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204, "restart_syscall": 219,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "preadv": 295, "getcpu": 309, "getrandom": 318, "membarrier": 324, "rseq": 334,
}  # fmt: skip
# Those that stay for some values of an argument: (number, which argument, values).
_ALLOWED_WITH = {
    "fcntl": (72, 1, (1, 3, 1030)),  # F_GETFD, F_GETFL, F_DUPFD_CLOEXEC; others could send signals
    "newfstatat": (262, 3, (0x1000,)),  # AT_EMPTY_PATH: an open file, no path
    "prlimit64": (302, 0, (0,)),  # its own limits alone
}
_ARCH_X86_64 = 0xC000003E
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the kernel's packet filters, which judge calls here
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in the kernel's struct seccomp_data


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
    if platform.machine() != "x86_64" or not _filter_calls(libc):
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
    program = b"".join(_program())
    # struct sock_fprog: the count of instructions, and where they are.
    instructions = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    return libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(table), 0, 0) == 0


def _program() -> list[bytes]:
    """A filter that allows what is listed; any other call fails as if the kernel did not know it."""

    def step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_so, if_not, value)  # how many steps are skipped

    steps = [step(_LOAD, _ARCH_AT), step(_EQUAL, _ARCH_X86_64, if_so=1), step(_RETURN, _KILL), step(_LOAD, _NUMBER_AT)]
    for number in _ALLOWED.values():
        steps += [step(_EQUAL, number, if_not=1), step(_RETURN, _ALLOW)]
    for number, argument, values in _ALLOWED_WITH.values():
        steps += [step(_EQUAL, number, if_not=2 + 2 * len(values)), step(_LOAD, _ARGUMENTS_AT + 8 * argument)]
        for value in values:
            steps += [step(_EQUAL, value, if_not=1), step(_RETURN, _ALLOW)]
        steps.append(step(_RETURN, _REFUSE))
    return [*steps, step(_RETURN, _REFUSE)]
