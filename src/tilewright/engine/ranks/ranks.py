"""The other ranks of an engine, as the first rank sees them: their start, their commands, and their end.

The first rank is the engine's process: it schedules, samples, and computes its own part of the model. It starts the
others as processes (parallel/launch.py). Steps and media lie in memory that all of them map. A command is a number in
that memory; `group.post` wakes the ranks that wait for it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from tilewright import config
from tilewright.engine.handle import EngineLostError
from tilewright.engine.options import EngineOptions
from tilewright.engine.run.inputs import ALIGNMENT, StepInputs, StepLayout
from tilewright.engine.run.runner import ModelRunner, RunnerSettings
from tilewright.host.binding import RankBinding, binding_of_ranks
from tilewright.host.files import CheckpointError
from tilewright.host.memory import shared_file
from tilewright.host.topology import read_topology
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.ops.native import apply_binding, release_binding
from tilewright.parallel.auto_tp import choose_tp
from tilewright.parallel.group import CollectiveError, Group
from tilewright.parallel.rendezvous import MAX_RANKS, open_rendezvous
from tilewright.process.workers import Workers, WorkerSpec
from tilewright.types import RequestError
from tilewright.weights.checkpoint import local_path


class RankCommand(enum.IntEnum):
    """The next command for all ranks."""

    run = 1  # the step
    draft = 2
    stop = 3


class StepMemory:
    """Shared memory of one engine's steps. The first rank creates it, the others map its file."""

    def __init__(self, layout: StepLayout, size: int, fd: int | None = None) -> None:
        """Create the memory for `size` ranks, or map `fd`, the first rank's file, which this takes over."""
        first = -(-(1 + size) * 8 // ALIGNMENT) * ALIGNMENT
        total = first + 2 * layout.size_bytes
        self.fd = shared_file("steps") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, total)
        memory = torch.frombuffer(mmap.mmap(self.fd, total), dtype=torch.uint8)
        numbers = memory[: (1 + size) * 8].view(torch.int64).numpy()
        self._command = numbers[:1]
        # Failed commands of each rank. When a step raises on all ranks, these are equal.
        self.num_failures: np.ndarray = numbers[1:]
        self.inputs = StepInputs(layout, memory[first : first + layout.size_bytes])
        self.draft_inputs = StepInputs(layout, memory[first + layout.size_bytes :])

    @property
    def command(self) -> RankCommand:
        return RankCommand(int(self._command[0]))

    @command.setter
    def command(self, command: RankCommand) -> None:
        self._command[0] = command

    def close(self) -> None:
        """Close the file; the memory lives as long as it is mapped."""
        os.close(self.fd)


# Ranks that raise at the same place of a step do so within milliseconds; one that did not waits in a collective.
FAILURE_WAIT_S = 5.0

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class RankLostError(EngineLostError):
    """A rank ended, hangs or failed alone, and the others cannot go on without it."""


def lead(group: Group, memory: StepMemory, command: RankCommand, compute: Callable[[], Result]) -> Result:
    """Send a command to all ranks, and return the result of `compute`, the first rank's part of it.

    An error that all ranks raise at the same place is the step's; after any other they no longer agree.
    """
    memory.command = command
    group.post()
    try:
        return compute()
    except CollectiveError as error:
        raise RankLostError(str(error)) from error
    except Exception as error:
        if not _all_failed(memory, 0):
            raise RankLostError(f"rank 0 failed alone: {error}") from error
        raise


def follow(rank: int, group: Group, memory: StepMemory, runner: ModelRunner) -> None:
    """Execute the first rank's commands until it sends stop."""
    while True:
        group.wait_for_post()
        command = memory.command
        if command is RankCommand.stop:
            return
        try:
            runner.run() if command is RankCommand.run else runner.draft()
        except CollectiveError:
            raise
        except Exception:
            _log.debug("rank %d could not %s", rank, command.name, exc_info=True)
            if not _all_failed(memory, rank):
                raise


def _all_failed(memory: StepMemory, rank: int) -> bool:
    """Count a failure of this rank, and return whether all ranks fail as often within FAILURE_WAIT_S."""
    memory.num_failures[rank] += 1
    deadline_s = time.monotonic() + FAILURE_WAIT_S
    while time.monotonic() < deadline_s:
        if (memory.num_failures >= memory.num_failures[rank]).all():
            return True
        time.sleep(0.001)
    return False


ENTRY = "tilewright.engine.ranks.worker:main"


@contextlib.contextmanager
def start_ranks(model: str | Path, options: EngineOptions) -> Iterator[EngineRanks | None]:
    """Start the other ranks of an engine until the context is left; None if it has a single rank.

    This process is bound as the first of them.
    """
    size = num_ranks(options.tp)
    with contextlib.ExitStack() as cleanup:
        try:
            bindings = binding_of_ranks(size, options.cpu_binding)
            ranks = None
            if size > 1:  # before this process is bound: children inherit its memory policy
                load = {"model": str(local_path(model)), "options": {**options.to_json(), "progress": False}}
                ranks = EngineRanks(size, load, bindings, backend=options.backend or "native")
                cleanup.callback(ranks.close)
            if bindings is not None:
                apply_binding(bindings[0])
                cleanup.callback(release_binding)
        except config.ConfigError as error:
            raise RequestError(str(error)) from error
        yield ranks


def num_ranks(tp: int | str) -> int:
    if tp == "auto":
        return choose_tp(read_topology(), config.from_environment().num_threads)
    if not isinstance(tp, int) or isinstance(tp, bool) or not 1 <= tp <= MAX_RANKS:
        raise RequestError(f"tp is {tp!r}, expected 1 to {MAX_RANKS}, or auto")
    return tp


class EngineRanks:
    """The ranks 1 to size - 1, which load their parts of the model as soon as this is made."""

    def __init__(
        self,
        size: int,
        load: Mapping[str, Any],
        bindings: list[RankBinding] | None,
        *,
        backend: str = "native",
        entry: str = ENTRY,
    ) -> None:
        """Take `load`, the model and the EngineOptions as JSON, or what the loader of another `entry` takes."""
        self.size = size
        self._on_loss: Callable[[RankLostError], object] | None = None
        self._lost: RankLostError | None = None
        self._has_lost = threading.Condition()
        self._memory: StepMemory | None = None
        self._is_closed = False
        self._host = open_rendezvous(size)
        try:
            self._workers = self._start(load, bindings, backend, entry)
            self.group = self._host.make_group(0)
        except BaseException:
            self._close_memory()
            raise
        # A thread of its own: its error ends the server's engine process, which ends with any of its threads.
        threading.Thread(target=self._report_loss, name="ranks", daemon=True).start()

    def _start(self, load: Mapping[str, Any], bindings: list[RankBinding] | None, backend: str, entry: str) -> Workers:
        payload = {"rendezvous": self._host.rendezvous.to_json(), "load": dict(load), "backend": backend}
        specs = [
            WorkerSpec(rank, payload, self._host.pass_fds, None if bindings is None else bindings[rank])
            for rank in range(1, self.size)
        ]
        return Workers(entry, specs, self.size, on_death=self._on_rank_death, log_level=_log_level())

    def wait_until_loaded(self) -> None:
        """Return when every rank has its part of the weights; raise the error of the first that failed."""
        self._receive("loaded")

    def start_steps(self, settings: RunnerSettings, layout: StepLayout, media_buffer: MediaBuffer | None) -> StepMemory:
        """Create the memory of the steps, and wait until all ranks read from it."""
        self._memory = memory = StepMemory(layout, self.size)
        fds = [memory.fd]
        message: dict[str, Any] = {"settings": settings.to_json()}
        if media_buffer is not None:
            fds.append(media_buffer.fd)
            message["media_buffer"] = media_buffer.shape
        for channel in self._workers.channels.values():
            channel.send(message, fds)
        self._receive("ready")
        return memory

    def watch(self, on_loss: Callable[[RankLostError], object]) -> None:
        """Call `on_loss`, from another thread, when a rank is lost."""
        with self._has_lost:
            self._on_loss = on_loss
            self._has_lost.notify_all()

    def do(self, command: RankCommand, compute: Callable[[], Result]) -> Result:
        """Send a command to all ranks, and return the result of `compute`, the first rank's part of it."""
        assert self._memory is not None, "ranks do nothing before start_steps"
        if self._lost:
            raise self._lost
        try:
            return lead(self.group, self._memory, command, compute)
        except RankLostError as error:
            raise self._record_loss(str(error)) from error

    def close(self) -> None:
        """End the other ranks."""
        with self._has_lost:
            self._is_closed = True
            self._has_lost.notify_all()
        self._workers.close()
        self.group.close()
        self._close_memory()

    def _close_memory(self) -> None:
        self._host.close()
        if self._memory is not None:
            self._memory.close()

    def _receive(self, expected: str) -> None:
        for rank, channel in self._workers.channels.items():
            message = channel.receive()
            if message is None:
                reason = self._lost or "its log says why"
                raise CheckpointError(f"rank {rank} of {self.size} ended while it started: {reason}")
            if expected not in message:
                raise CheckpointError(f"rank {rank} of {self.size}: {message['error']}")

    def _on_rank_death(self, rank: int, reason: str) -> None:
        self._host.abort(rank)  # so that ranks waiting for it fail at once
        self._record_loss(f"rank {rank} {reason}")

    def _record_loss(self, reason: str) -> RankLostError:
        """Record a loss and return the error of the first one: later ones follow from it."""
        with self._has_lost:
            if self._lost is None:
                self._lost = RankLostError(f"a rank of the engine is lost, which needs all {self.size}: {reason}")
                self._has_lost.notify_all()
            return self._lost

    def _report_loss(self) -> None:
        with self._has_lost:
            self._has_lost.wait_for(lambda: self._is_closed or (self._lost and self._on_loss))
        if self._is_closed or self._lost is None or self._on_loss is None:
            return
        self._on_loss(self._lost)
        raise self._lost


def _log_level() -> int:
    """Return the log level of the other ranks, which repeat the first one's messages: only errors unless debugging."""
    level = logging.getLogger("tilewright").getEffectiveLevel()
    return level if level <= logging.DEBUG else logging.WARNING
