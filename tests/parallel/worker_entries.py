"""Entry points of workers, for tests: each a small part of what a rank does."""

import contextlib
import ctypes
import json
import logging
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path


def cpus_of_threads():
    """Where each thread of this process may run."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, as threads of an earlier team do
            found.append(os.sched_getaffinity(int(thread)))
    return found


def tell(channel, rank, size, payload, fds):
    """Writes what it was given, and what it is, as a line to its first file; then waits to be ended."""
    told = {
        "rank": rank,
        "size": size,
        "payload": payload,
        "cpus": sorted(os.sched_getaffinity(0)),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "stdin": sys.stdin.read(),
        "ignores_interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "has_torch": "torch" in sys.modules,
        "open_files": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    }
    os.write(fds[0], json.dumps(told).encode() + b"\n")
    wait(channel, rank, size, payload, fds)


def wait(channel, rank, size, payload, fds):
    while True:
        time.sleep(60)


def finish(channel, rank, size, payload, fds):
    print("done", flush=True)


def die_if_told(channel, rank, size, payload, fds):
    """Rank `payload["rank"]` ends as `payload["how"]` says; others wait."""
    if rank != payload["rank"]:
        wait(channel, rank, size, payload, fds)
    how = payload["how"]
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exception":
        threading.Thread(target=time.sleep, args=(60,)).start()  # which must not hold the end up
        raise ValueError("no such tile")
    if how == "thread":
        threading.Thread(target=lambda: {}["no such tile"]).start()
        wait(channel, rank, size, payload, fds)
    if how == "exit":
        print("leaving", file=sys.stderr)
        sys.exit(3)


def hang(channel, rank, size, payload, fds):
    """Does not end by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(fds[0], b"ready\n")
    wait(channel, rank, size, payload, fds)


def log(channel, rank, size, payload, fds):
    for name in ("tilewright.test", "other"):
        logging.getLogger(name).info("info of %s", name)
        logging.getLogger(name).warning("warning of %s", name)


def print_much(channel, rank, size, payload, fds):
    for line in range(2000):
        print(f"line {line} " + "x" * 100)
    print("y" * 20000, end="", flush=True)


def leave_a_grandchild(channel, rank, size, payload, fds):
    """Dies while a process that it started still has its standard error open."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.write(fds[0], f"{child.pid}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def compute(channel, rank, size, payload, fds):
    """Loads the kernels and writes what became of the binding."""
    import torch

    from tilewright.ops.linear import linear, pack_weight
    from tilewright.ops.native import kernels

    linear(torch.ones(64, 64), pack_weight(torch.ones(64, 64)))
    told = {
        "num_threads": kernels.num_threads(),
        "torch_threads": torch.get_num_threads(),
        "cpus_of_threads": [sorted(cpus) for cpus in cpus_of_threads()],
        "memory_policy": memory_policy(),
    }
    os.write(fds[0], json.dumps(told).encode() + b"\n")


def compute_confined(channel, rank, size, payload, fds):
    """The same where the system refuses to bind anything, as it may in a container."""
    from tilewright.host.binding import RankBinding, claim_cpus

    forbid({"x86_64": (203, 238), "aarch64": (122, 237)}[platform.machine()])  # sched_setaffinity, set_mempolicy
    claim_cpus(RankBinding(rank, tuple(payload["cpus"]), (0,), 2))
    compute(channel, rank, size, payload, fds)


def forbid(numbers):
    """Has these system calls fail with EPERM from now on, in this process."""
    load, equal, allow, refuse = 0x20, 0x15, 0x7FFF0000, 0x00050001
    program = [(load, 0, 0, 0)]  # the number of the call
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(0x06, 0, 0, allow), (0x06, 0, 0, refuse)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    filter = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP


def memory_policy():
    """That of the main thread, as the system writes it: "default", "prefer:0"; None where it has no nodes."""
    maps = Path("/proc/self/numa_maps")
    return maps.read_text().split(" ", 1)[1].split(" file=")[0].split()[0] if maps.exists() else None
