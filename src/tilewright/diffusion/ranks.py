"""The other ranks of a `Diffusion`: processes that run the same requests, each with its part of the networks.

The first rank is the process of the `Diffusion`. Every rank runs the whole pipeline on the same parameters, and the
collectives of the layers keep them in step. Only the first rank decides: after each step it tells the others to go on
or to stop. It alone decodes latents, for previews and at the end.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright import config
from tilewright.diffusion.params import Cancelled, DiffusionLostError, GenerationParams
from tilewright.diffusion.pipeline import OnStep, Pipeline
from tilewright.diffusion.pipelines import open_pipeline
from tilewright.host.binding import binding_of_ranks
from tilewright.host.files import CheckpointError
from tilewright.ops import backend
from tilewright.ops.native import apply_binding, bind_team, release_binding
from tilewright.ops.platform import Platform
from tilewright.parallel.group import Group
from tilewright.parallel.rendezvous import MAX_RANKS, Rendezvous, make_group, open_rendezvous
from tilewright.process.frames import Channel
from tilewright.process.workers import Workers, WorkerSpec
from tilewright.types import RequestError, UnsupportedConfig

_log = logging.getLogger(__name__)

# Ranks wait for each other's loading, and for each other's part of a large step. A death is noticed at once.
TIMEOUT_S = 600.0
# Errors that every rank raises at the same place of a run, with no collective left incomplete.
SHARED_ERRORS = (Cancelled, RequestError, UnsupportedConfig, CheckpointError)


class DiffusionCommand(enum.IntEnum):
    stop = 0  # for ranks that are threads; processes are killed
    run = 1
    go_on = 2
    cancel = 3


def check_size(tp: int) -> int:
    """Return the number of ranks; RequestError if it is impossible."""
    if not isinstance(tp, int) or isinstance(tp, bool) or not 1 <= tp <= MAX_RANKS:
        raise RequestError(f"tp is {tp!r}, expected 1 to {MAX_RANKS}")
    return tp


class DiffusionRanks:
    """The ranks 1 to size - 1, as the first one sees them."""

    def __init__(self, size: int, components: Mapping[str, Any], platform: Platform, cpu_binding: str | None) -> None:
        """Start the ranks; `components` are the arguments of `open_pipeline`, as JSON."""
        self._lost: DiffusionLostError | None = None
        self._cleanup = contextlib.ExitStack()
        try:
            self._start(size, components, platform, cpu_binding)
        except config.ConfigError as error:
            self._cleanup.close()
            raise RequestError(str(error)) from error
        except BaseException:
            self._cleanup.close()
            raise

    def _start(self, size: int, components: Mapping[str, Any], platform: Platform, cpu_binding: str | None) -> None:
        bindings = binding_of_ranks(size, cpu_binding)
        self._host = self._cleanup.enter_context(open_rendezvous(size, timeout_s=TIMEOUT_S))
        payload = {
            "rendezvous": self._host.rendezvous.to_json(),
            "components": dict(components),
            "backend": platform.backend,
            "device": platform.device,
        }
        specs = [
            WorkerSpec(rank, payload, self._host.pass_fds, None if bindings is None else bindings[rank])
            for rank in range(1, size)
        ]
        workers = Workers(platform.worker, specs, size, on_death=self._note_death)
        self._cleanup.callback(workers.close)
        self.pids = tuple(workers.pids.values())
        self.group = self._host.make_group(0)
        self._cleanup.callback(self.group.close)
        if bindings is not None:  # after the others have started: they would inherit it
            apply_binding(bindings[0])
            self._cleanup.callback(release_binding)

    @contextlib.contextmanager
    def running(self, params: GenerationParams, on_step: OnStep) -> Iterator[OnStep]:
        """Run the request on the other ranks while the first runs it in the context, with the on_step that it gets.

        Whatever `on_step` raises, the others stop as well. A rank that fails alone ends all of them.
        """
        if self._lost:
            raise self._lost
        is_ended_by_caller = False

        def decide(step: int, num_steps: int, latents: Tensor) -> None:
            nonlocal is_ended_by_caller
            try:
                on_step(step, num_steps, latents)
            except BaseException:
                self.tell(DiffusionCommand.cancel)
                is_ended_by_caller = True
                raise
            self.tell(DiffusionCommand.go_on)

        try:
            self.tell(DiffusionCommand.run, params)  # a rank that has just died is noticed here
            yield decide
        except SHARED_ERRORS:
            raise
        except BaseException as error:
            if is_ended_by_caller:
                raise
            self._lose(f"rank 0 failed alone: {error!r}")
            assert self._lost is not None
            raise self._lost from error

    def tell(self, command: DiffusionCommand, content: object = None) -> None:
        """Send a command to the other ranks, which wait for it."""
        self.group.post()
        # Both ends are this program, and the memory between them is private.
        data = b"" if content is None else pickle.dumps(content)
        self.group.broadcast(torch.tensor([command, len(data)]))
        if data:
            self.group.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def close(self) -> None:
        """End the other ranks."""
        self._cleanup.close()  # killed, not asked: a lost rank would not answer

    def _note_death(self, rank: int, reason: str) -> None:
        self._host.abort(rank)  # so that ranks waiting for it fail at once
        self._lose(f"rank {rank} {reason}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = DiffusionLostError(f"a rank is lost, and the others cannot go on without it: {reason}")


def main(channel: Channel, rank: int, size: int, payload: dict[str, Any], fds: list[int]) -> None:
    """Run one of the other ranks; the entry point of its process."""
    group = make_group(Rendezvous.from_json(payload["rendezvous"]), rank)
    backend.activate(payload["backend"], payload["device"])
    bind_team()
    follow(open_pipeline(**payload["components"], group=group))


def follow(pipeline: Pipeline) -> None:
    """Run the first rank's requests until it sends stop."""
    group = pipeline.components.group
    while True:
        command, params = _listen(group)
        if command is DiffusionCommand.stop:
            return
        try:
            pipeline.generate(params, _following(group))
        except SHARED_ERRORS as error:
            _log.debug("rank %d ends a run: %r", group.rank, error)


def _following(group: Group) -> OnStep:
    def on_step(step: int, num_steps: int, latents: Tensor) -> None:
        if _listen(group)[0] is DiffusionCommand.cancel:
            raise Cancelled

    return on_step


def _listen(group: Group) -> tuple[DiffusionCommand, Any]:
    group.wait_for_post()
    header = group.broadcast(torch.zeros(2, dtype=torch.int64))
    command, size_bytes = header.tolist()
    content = None
    if size_bytes:
        content = pickle.loads(group.broadcast(torch.zeros(size_bytes, dtype=torch.uint8)).numpy().tobytes())
    return DiffusionCommand(command), content
