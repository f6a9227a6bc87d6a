"""Runs a function on every rank of a group, each in a process of its own.

    results = run_ranks(2, body, argument, ...)   # body(rendezvous, rank, argument, ...) on each; its result per rank

Processes are forked from a clean server that has imported torch once: a rank starts in milliseconds.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import traceback
from multiprocessing import reduction
from pathlib import Path

import torch

from tilewright.ops.native import kernels
from tilewright.parallel.rendezvous import open_rendezvous

START_TIMEOUT_S = 120  # of a rank on a machine with other things to do
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch", "tilewright.parallel.rendezvous"])


class Handed:
    """A Rendezvous on its way to another process, with the descriptor it speaks of."""

    def __init__(self, rendezvous):
        self.rendezvous = rendezvous

    def __getstate__(self):
        fd = self.rendezvous.segment_fd
        return self.rendezvous, None if fd is None else reduction.DupFd(fd)

    def __setstate__(self, state):
        self.rendezvous, duplicate = state
        if duplicate is not None:
            self.rendezvous = dataclasses.replace(self.rendezvous, segment_fd=duplicate.detach())


@dataclasses.dataclass
class Rank:
    process: multiprocessing.Process
    results: object

    def result(self, timeout_s=START_TIMEOUT_S):
        """What the body returned; raises if it failed."""
        assert self.results.poll(timeout_s), f"rank {self.process.name} gave no result in {timeout_s} s"
        ok, value = self.results.recv()
        assert ok, value
        return value


def _main(results, num_threads, body, handed, arguments):
    kernels.set_num_threads(num_threads)
    torch.set_num_threads(1)
    try:
        result = body(*[entry.rendezvous for entry in handed], *arguments)
        results.send((True, result))
    except BaseException:
        results.send((False, traceback.format_exc()))


def start_rank(rank, body, rendezvous, *arguments, num_threads=1):
    """body(*rendezvous, rank, *arguments) in a new process."""
    ours, theirs = _context.Pipe(duplex=False)
    handed = [Handed(one) for one in rendezvous]
    process = _context.Process(
        target=_main, args=(theirs, num_threads, body, handed, (rank, *arguments)), name=str(rank), daemon=True
    )
    process.start()
    theirs.close()
    return Rank(process, ours)


@contextlib.contextmanager
def started_ranks(size, body, *arguments, hosts=None, num_threads=1, **options):
    """A host and its ranks, all running body(rendezvous, rank, *arguments); none is left afterwards."""
    with contextlib.ExitStack() as stack:
        hosts = hosts or [stack.enter_context(open_rendezvous(size, **options))]
        rendezvous = [host.rendezvous for host in hosts]
        ranks = [start_rank(rank, body, rendezvous, *arguments, num_threads=num_threads) for rank in range(size)]
        try:
            yield hosts[0], ranks
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.results.close()


def run_ranks(size, body, *arguments, **options):
    """What body(rendezvous, rank, *arguments) returns on each rank."""
    with started_ranks(size, body, *arguments, **options) as (_, ranks):
        return [rank.result() for rank in ranks]


def holders_of_segments():
    """(process, what) of everything this run has started that holds memory of a group, by descriptor or by mapping."""
    held = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(process.name)) != os.getpgrp():  # of somebody else
                continue
            held += [
                (int(process.name), str(fd))
                for fd in (process / "fd").iterdir()
                if os.readlink(fd).startswith("/memfd:tilewright_group")
            ]
            if "memfd:tilewright_group" in (process / "maps").read_text():
                held.append((int(process.name), "maps"))
    return held
