"""A rank other than the first: loads its part of the model, then executes the first rank's commands step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.load.loading import load_network
from tilewright.engine.options import EngineOptions
from tilewright.engine.ranks.ranks import StepMemory, follow
from tilewright.engine.run.runner import RunnerSettings, build_runner
from tilewright.host.files import CheckpointError
from tilewright.inputs.media_buffer import map_rows
from tilewright.models.protocol import Model
from tilewright.ops import backend
from tilewright.ops.native import bind_team
from tilewright.parallel.group import Group
from tilewright.parallel.rendezvous import Rendezvous, make_group
from tilewright.process.frames import Channel
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights.cache import EntryCheck


def main(channel: Channel, rank: int, size: int, payload: dict[str, Any], fds: list[int]) -> None:
    """Run the worker; the entry point for process/workers.py."""
    run_rank(channel, rank, size, payload, _load)


def _load(arguments: dict[str, Any], group: Group) -> tuple[Model, torch.dtype]:
    network = load_network(arguments["model"], EngineOptions.from_json(arguments["options"]), group)
    if network.report.unchecked is not None:
        EntryCheck(network.report.unchecked)  # damage ends this process and with it the engine; the next start repacks
    return network.model, network.dtype


def run_rank(
    channel: Channel,
    rank: int,
    size: int,
    payload: dict[str, Any],
    load: Callable[[dict[str, Any], Group], tuple[Model, torch.dtype]],
) -> None:
    """Run a rank until it is stopped; `load` makes its part of the model from the first rank's arguments."""
    group = make_group(Rendezvous.from_json(payload["rendezvous"]), rank)
    backend.activate(payload["backend"])
    bind_team()
    try:
        model, dtype = load(payload["load"], group)
    except (CheckpointError, UnsupportedConfig, RequestError, FileNotFoundError) as error:
        channel.send({"error": str(error)})
        return
    channel.send({"loaded": True})
    files: list[int] = []
    message = channel.receive(fds=files)
    if message is None:
        return
    settings = RunnerSettings.from_json(message["settings"])
    model.fit_context(settings.limits.max_context)
    memory = StepMemory(settings.layout(model), size, files[0])
    media_rows = _media_rows(message, files, dtype)
    runner = build_runner(model, dtype, settings, memory.inputs, memory.draft_inputs, media_rows)
    channel.send({"ready": True})
    follow(rank, group, memory, runner)


def _media_rows(message: dict[str, Any], files: list[int], dtype: torch.dtype) -> Tensor | None:
    if "media_buffer" not in message:
        return None
    num_rows, width = message["media_buffer"]
    return map_rows(files[1], num_rows, width, dtype)
