"""The filter of system calls, run here for every architecture it knows, whatever this machine is."""

import errno
import platform
import re
import struct
from pathlib import Path

import pytest

from tilewright.process import confine
from tilewright.process import confine as seccomp

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS  # of the kernel's seccomp.h
MACHINES = ("x86_64", "aarch64")
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}
# Numbers of what a process that was taken over would like to call.
FORBIDDEN = {
    "x86_64": {
        "open": 2, "stat": 4, "ioctl": 16, "pwrite64": 18, "dup": 32, "socket": 41, "connect": 42, "sendmsg": 46,
        "clone": 56, "fork": 57, "execve": 59, "kill": 62, "ftruncate": 77, "ptrace": 101, "prctl": 157, "tgkill": 234,
        "openat": 257, "process_vm_writev": 311, "memfd_create": 319, "execveat": 322, "statx": 332,
        "io_uring_setup": 425, "clone3": 435, "openat2": 437,
    },
    "aarch64": {
        "dup": 23, "ioctl": 29, "ftruncate": 46, "openat": 56, "pwrite64": 68, "ptrace": 117, "kill": 129,
        "tgkill": 131, "prctl": 167, "socket": 198, "connect": 203, "sendmsg": 211, "clone": 220, "execve": 221,
        "process_vm_writev": 271, "memfd_create": 279, "execveat": 281, "statx": 291, "io_uring_setup": 425,
        "clone3": 435, "openat2": 437,
    },
}  # fmt: skip
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h", "/usr/aarch64-linux-gnu/include/asm-generic/unistd.h"),
}


def judge(program, arch, number, arguments=()):
    """What the program says of a call: the kernel's packet filter, as far as it is used."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(tuple(arguments) + (0,) * 6)[:6])
    steps = list(struct.iter_unpack("<HBBI", program))
    at = loaded = 0
    while True:
        code, if_so, if_not, value = steps[at]
        at += 1
        match code:
            case 0x20:  # load a word
                (loaded,) = struct.unpack_from("<I", data, value)
            case 0x15:  # compare, skip
                at += if_so if loaded == value else if_not
            case 0x06:
                return value
            case _:
                raise AssertionError(f"step {at - 1} has the code {code:#x}, which the kernel's filter may not know")


def verdict(machine, number, *arguments):
    return judge(seccomp.filter_program(machine), seccomp.ARCHITECTURES[machine], number, arguments)


def numbers_of_header(text):
    """Names and numbers of a kernel's header, the ones given by another name of the same header too."""
    given = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", text, re.MULTILINE))
    for name, other in re.findall(r"^#define __NR_(\w+)\s+__NR3264_(\w+)$", text, re.MULTILINE):
        given.setdefault(name, given.get(other))
    return {name: int(number) for name, number in given.items() if number is not None}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_listed_is_allowed_and_all_else_refused(machine):
    named = seccomp.numbers(machine)
    assert len(set(named.values())) == len(named) > 50
    always = {number for name, number in named.items() if seccomp.CALLS[name].argument is None}
    for number in {*range(600)} - {*named.values()} | always:
        assert verdict(machine, number) == (ALLOW if number in always else REFUSE), number
    for name, number in FORBIDDEN[machine].items():
        assert verdict(machine, number) == REFUSE, name


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_are_looked_at(machine):
    named = seccomp.numbers(machine)
    handle, path, buffer = 5, 0x7FFF_0000_1000, 0x7FFF_0000_2000
    for command, expected in ((1, ALLOW), (3, ALLOW), (1030, ALLOW), (0, REFUSE), (4, REFUSE), (8, REFUSE)):
        assert verdict(machine, named["fcntl"], handle, command, 1) == expected, command
    for flags, expected in ((0x1000, ALLOW), (0, REFUSE), (0x100, REFUSE), (0x1100, REFUSE)):
        assert verdict(machine, named["newfstatat"], handle, path, buffer, flags) == expected, flags
    for process, expected in ((0, ALLOW), (1, REFUSE), (4242, REFUSE)):
        assert verdict(machine, named["prlimit64"], process, 7, buffer, 0) == expected, process


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_end_the_process(machine):
    program = seccomp.filter_program(machine)
    for arch in (seccomp.ARCHITECTURES[OTHER[machine]], 0x40000003, 0x40000028, 0):  # i386, 32-bit ARM, none
        assert judge(program, arch, seccomp.numbers(machine)["read"]) == KILL


def test_x32_numbers_are_refused():
    for number in (*seccomp.numbers("x86_64").values(), 512, 520):
        assert verdict("x86_64", 0x40000000 | number) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_is_one_the_kernel_takes(machine):
    """As its checker demands: not too long, no jump past the end, the last step returns."""
    steps = list(struct.iter_unpack("<HBBI", seccomp.filter_program(machine)))
    assert len(steps) < 4096 and steps[-1][0] == 0x06
    assert all(
        at + 1 + max(if_so, if_not) < len(steps) for at, (code, if_so, if_not, _) in enumerate(steps) if code == 0x15
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_the_kernels(machine):
    headers = [path for name in HEADERS[machine] if (path := Path(name)).exists()]
    if not headers:
        pytest.skip(f"no kernel headers of {machine} here")
    known = numbers_of_header(headers[0].read_text())
    assert len(known) > 250
    missing = {name for name in seccomp.CALLS if name not in known}
    assert missing == {name for name, call in seccomp.CALLS.items() if getattr(call, machine) is None}
    assert {name: known[name] for name in seccomp.numbers(machine)} == seccomp.numbers(machine)
    assert {name: known[name] for name in FORBIDDEN[machine]} == FORBIDDEN[machine]


@pytest.mark.parametrize("machine", ["riscv64", "aarch64_be", "armv8l", "i686", ""])
def test_an_unknown_architecture_gets_no_filter_and_says_so(machine, monkeypatch):
    assert seccomp.filter_program(machine) is None
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(confine, "_limit", lambda what, most: None)
    monkeypatch.setattr(confine.ctypes, "CDLL", lambda name, use_errno: Library())
    assert confine.confine(2**30) == ["seccomp"]


class Library:
    """A C library whose calls all succeed, and change nothing."""

    def prctl(self, option, *arguments):
        assert option != 22, "PR_SET_SECCOMP, without a program"
        return 0
