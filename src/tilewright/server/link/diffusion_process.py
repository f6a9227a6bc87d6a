"""The diffusion worker's process: reads requests from a socket, sends their progress.

It runs at a lower priority than the engine (docs/server.md has measurements). On a machine with several memory nodes,
its threads and memory are on the last one, since the engine's ranks use the first nodes first.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

from tilewright import config
from tilewright.diffusion.requests import progress_to_json, request_from_json
from tilewright.diffusion.worker import DiffusionModel, Worker
from tilewright.host.binding import claim_cpus, plan_binding
from tilewright.host.files import CheckpointError
from tilewright.host.memory import explained_shortage, require_start
from tilewright.host.topology import read_topology
from tilewright.inputs.media import MediaLimits
from tilewright.process.frames import Channel
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights import embedded


def open_diffusion(**options: Any) -> DiffusionModel:
    """Open a Diffusion; raise RequestError for a model that cannot be loaded."""
    name = embedded.name_of(options.get("model") or embedded.DRAWING_NAME)
    require_start(name)
    try:
        with explained_shortage(name):
            from tilewright.diffusion.diffusion import Diffusion

            return Diffusion(**options)
    except (CheckpointError, UnsupportedConfig, FileNotFoundError) as error:
        raise RequestError(str(error)) from error


def serve(channel: Channel, options: dict[str, Any]) -> None:
    """Serve requests until the other end closes. Option `entry` names the function that opens the model, called with
    the arguments in `model`.
    """
    os.nice(options["niceness"])
    if options["num_threads"] is not None:
        config.use(dataclasses.replace(config.current(), num_threads=options["num_threads"]))
    if options["model"].get("tp", 1) == 1:  # with several ranks, each is bound to a node of its own
        _take_a_node()
    module, _, function = options["entry"].partition(":")
    try:
        model = getattr(importlib.import_module(module), function)(**options["model"])
    except RequestError as error:
        channel.send({"refused": str(error)})
        return
    worker = Worker(
        model,
        lambda request_id, progress: channel.send({"request": request_id, "progress": progress_to_json(progress)}),
        MediaLimits(**options["media_limits"]),
        _bind_thread,
    )
    channel.send({"ready": {"limits": dataclasses.asdict(model.limits)}})
    while (message := channel.receive()) is not None:
        if "make" in message:
            worker.submit(message["make"], request_from_json(message["request"]))
        elif "expect" in message:
            found = worker.expect(request_from_json(message["request"]), message["allowed_s"])
            about = None if found is None else dataclasses.asdict(found)
            channel.send({"expected": message["expect"], "expectation": about})
        elif "cancel" in message:
            worker.cancel(message["cancel"])
        else:
            raise ValueError(f"unknown message with {sorted(message)}")
    # The server has closed the socket: running requests have no reader, and the process keeps nothing on disk.
    os._exit(0)


def _take_a_node() -> None:
    """Bind the process to the last of several memory nodes, before torch and the kernels count CPUs."""
    topology = read_topology()
    if len(topology.nodes) > 1:
        plan = plan_binding(topology, len(topology.nodes), num_threads=config.current().num_threads)
        claim_cpus(plan.ranks[-1])


def _bind_thread() -> None:
    """Bind the calling thread and its team to CPUs if the process is bound: it would have only one thread's CPU."""
    if config.current().bind_cpus:
        from tilewright.ops.native import bind_team

        bind_team()
