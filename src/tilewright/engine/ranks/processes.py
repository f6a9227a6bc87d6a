"""The other ranks of an engine, as the first one sees them: their start, each command, and their end.

The first rank is the process of the engine: it schedules, samples, and computes its own part of the model. The others
are processes that it starts (parallel/launch.py). Steps and media lie in memory that all of them map.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tilewright import config
from tilewright.engine.ranks.channel import Channel
from tilewright.engine.ranks.commands import RankLostError, lead
from tilewright.engine.ranks.step_memory import Command, StepMemory
from tilewright.engine.runner_settings import RunnerSettings
from tilewright.engine.step_inputs import StepLayout
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.model_files import CheckpointError
from tilewright.parallel.auto_tp import choose_tp
from tilewright.parallel.binding import RankBinding, apply_binding, binding_of_ranks, release_binding
from tilewright.parallel.launch import Workers, WorkerSpec
from tilewright.parallel.rendezvous import MAX_RANKS, open_rendezvous
from tilewright.parallel.topology import read_topology
from tilewright.types import RequestError
from tilewright.weights.checkpoint import local_path

ENTRY = "tilewright.engine.ranks.worker:main"

Result = TypeVar("Result")


@contextlib.contextmanager
def start_ranks(
    tp: int | str, cpu_binding: str | None, model: str | Path, *, backend: str, **loading: Any
) -> Iterator[Ranks | None]:
    """The other ranks of an engine, until the context is left; None where it has one rank alone.

    `tp` is their number with the first, or "auto"; this process is bound as the first of them.
    """
    size = num_ranks(tp)
    with contextlib.ExitStack() as cleanup:
        try:
            bindings = binding_of_ranks(size, cpu_binding)
            ranks = None
            if size > 1:  # before this process is bound: children inherit where memory comes from
                ranks = Ranks(size, {"name": str(local_path(model)), **loading}, bindings, backend=backend)
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


class Ranks:
    """Starts the ranks 1 to size - 1, which load their parts of the model at once."""

    def __init__(
        self,
        size: int,
        load: Mapping[str, Any],
        bindings: list[RankBinding] | None,
        *,
        backend: str = "native",
        entry: str = ENTRY,
    ) -> None:
        """`load` are the arguments of `loading.load_network`, as JSON; with another `entry`, those of its loader."""
        self.size = size
        self._on_loss: Callable[[RankLostError], object] | None = None
        self._lost: RankLostError | None = None
        self._has_lost = threading.Condition()
        self._memory: StepMemory | None = None
        self._is_closed = False
        self._channels: dict[int, Channel] = {}
        self._host = open_rendezvous(size)
        try:
            self._workers = self._start(load, bindings, backend, entry)
            self.group = self._host.make_group(0)
        except BaseException:
            self._let_go()
            raise
        # A thread of its own, whose error ends a process that ends with its threads: the server's engine.
        threading.Thread(target=self._tell_of_loss, name="ranks", daemon=True).start()

    def _start(self, load: Mapping[str, Any], bindings: list[RankBinding] | None, backend: str, entry: str) -> Workers:
        pairs = {rank: Channel.pair() for rank in range(1, self.size)}
        self._channels = {rank: ours for rank, (ours, _) in pairs.items()}
        rendezvous = self._host.rendezvous.to_json()
        specs = [
            WorkerSpec(
                rank,
                {"rendezvous": rendezvous, "load": dict(load), "backend": backend, "channel": theirs.fileno()},
                (theirs.fileno(), *self._host.pass_fds),
                None if bindings is None else bindings[rank],
            )
            for rank, (_, theirs) in pairs.items()
        ]
        try:
            return Workers(entry, specs, self.size, on_death=self._note_death, log_level=_log_level())
        finally:
            for _, theirs in pairs.values():
                theirs.close()

    def wait_until_loaded(self) -> None:
        """Returns when every rank has its part of the weights; raises what kept one of them from it."""
        self._receive("loaded")

    def start_steps(self, settings: RunnerSettings, layout: StepLayout, media_buffer: MediaBuffer | None) -> StepMemory:
        """Where steps are written from now on, for all ranks."""
        self._memory = memory = StepMemory(layout, self.size)
        fds = [memory.fd]
        message: dict[str, Any] = {"settings": settings.to_json()}
        if media_buffer is not None:
            fds.append(media_buffer.fd)
            message["media_buffer"] = media_buffer.shape
        for channel in self._channels.values():
            channel.send(message, fds)
        self._receive("ready")
        return memory

    def watch(self, on_loss: Callable[[RankLostError], object]) -> None:
        """Calls `on_loss`, from another thread, when a rank is lost."""
        with self._has_lost:
            self._on_loss = on_loss
            self._has_lost.notify_all()

    def do(self, command: Command, compute: Callable[[], Result]) -> Result:
        """What `compute` gives, the first rank's part of a command that all ranks do (commands.py)."""
        assert self._memory is not None, "ranks do nothing before start_steps"
        if self._lost:
            raise self._lost
        try:
            return lead(self.group, self._memory, command, compute)
        except RankLostError as error:
            raise self._lose(str(error)) from error

    def close(self) -> None:
        """Ends the other ranks."""
        with self._has_lost:
            self._is_closed = True
            self._has_lost.notify_all()
        self._workers.close()
        self.group.close()
        self._let_go()

    def _let_go(self) -> None:
        self._host.close()
        for channel in self._channels.values():
            channel.close()
        if self._memory is not None:
            self._memory.close()

    def _receive(self, expected: str) -> None:
        for rank, channel in self._channels.items():
            try:
                message, _ = channel.receive()
            except (EOFError, ConnectionError) as error:
                reason = self._lost or "its log says why"
                raise CheckpointError(f"rank {rank} of {self.size} ended while it started: {reason}") from error
            if expected not in message:
                raise CheckpointError(f"rank {rank} of {self.size}: {message['error']}")

    def _note_death(self, rank: int, reason: str) -> None:
        self._host.abort(rank)  # whoever waits for it fails at once
        self._lose(f"rank {rank} {reason}")

    def _lose(self, reason: str) -> RankLostError:
        """The error of the first loss: later ones follow from it."""
        with self._has_lost:
            if self._lost is None:
                self._lost = RankLostError(f"a rank of the engine is lost, which needs all {self.size}: {reason}")
                self._has_lost.notify_all()
            return self._lost

    def _tell_of_loss(self) -> None:
        with self._has_lost:
            self._has_lost.wait_for(lambda: self._is_closed or (self._lost and self._on_loss))
        if self._is_closed or self._lost is None or self._on_loss is None:
            return
        self._on_loss(self._lost)
        raise self._lost


def _log_level() -> int:
    """Of the other ranks, which say what the first one says too: only on request."""
    level = logging.getLogger("tilewright").getEffectiveLevel()
    return level if level <= logging.DEBUG else logging.WARNING
