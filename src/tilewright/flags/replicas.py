"""The flags of commands that run several engines. Imports no Ray."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from tilewright import config
from tilewright.flags.options import positive
from tilewright.types import RequestError


@dataclass(frozen=True)
class ReplicaCount:
    """The range of the number of replicas, within which the load decides."""

    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most


def add_arguments(parser: argparse.ArgumentParser, count: Any, count_help: str) -> None:
    """Add the flags; `count` parses the number of replicas."""
    group = parser.add_argument_group("replicas", "Several engines, by Ray: pip install 'ray[serve,data]'.")
    group.add_argument("--replicas", type=count, metavar="N", help=count_help)
    group.add_argument(
        "--replica-cpus", type=positive, metavar="N",
        help="CPUs per replica (default: an equal share)",
    )  # fmt: skip
    group.add_argument(
        "--ray-address", metavar="HOST:PORT",
        help="the Ray cluster to use, like RAY_ADDRESS (default: a cluster started on this machine)",
    )  # fmt: skip


def fixed_count(text: str) -> ReplicaCount:
    number = positive(text)
    return ReplicaCount(number, number)


def count_or_range(text: str) -> ReplicaCount:
    if not re.fullmatch(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of replicas, such as 2, or a range, such as 1:4")
    least, _, most = text.partition(":")
    if int(most or least) < int(least):
        raise argparse.ArgumentTypeError(f"{text!r} has fewer replicas at most than at least")
    return ReplicaCount(int(least), int(most or least))


def check(options: argparse.Namespace) -> None:
    """Raise RequestError for flags that need --replicas, or if Ray is not installed."""
    if options.replicas is None:
        for name in ("replica_cpus", "ray_address"):
            if getattr(options, name) is not None:
                raise RequestError(f"--{name.replace('_', '-')} is given, expected --replicas with it")
    elif importlib.util.find_spec("ray") is None:
        raise RequestError("--replicas needs Ray, which is not installed: pip install 'ray[serve,data]'")


def cpus_per_replica(cpus_of_nodes: list[int], num_replicas: int) -> int:
    """Return the most CPUs that each replica can have; raise RequestError if there are fewer CPUs than replicas.

    A replica runs on one machine, so that CPUs may remain unused: three replicas on two machines of 16 get 8 each.
    """
    for num_cpus in range(max(cpus_of_nodes, default=0), 0, -1):
        if sum(node // num_cpus for node in cpus_of_nodes) >= num_replicas:
            return num_cpus
    raise RequestError(f"{num_replicas} replicas need as many CPUs, the Ray cluster has {sum(cpus_of_nodes)}")


def local_options(options: dict[str, Any], num_cpus: int, num_replicas: int) -> dict[str, Any]:
    """Return the Engine's options with this replica's share of the machine's memory, and set its number of threads."""
    config.use_threads(num_cpus)
    if options.get("kv_memory") is not None:
        return options
    num_here = max(1, min(num_replicas, len(config.current().available_cpus) // num_cpus))
    return {**options, "kv_memory": f"{50 / num_here:g}%"}
