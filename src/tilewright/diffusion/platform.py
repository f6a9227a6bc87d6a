"""Where pictures are computed: all that depends on the device, in one place.

A platform says which backend of the ops computes, what attention runs on, how much memory there is, which class runs
the other ranks, and whether layers are streamed. Networks and pipelines ask nothing else about the machine. What other
devices would need is in docs/platforms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright import host_memory
from tilewright.ops import backend as ops_backend
from tilewright.types import RequestError

WORKER = "tilewright.diffusion.ranks:main"
NOT_BUILT = ("mps", "xpu", "npu")


@dataclass(frozen=True)
class Platform:
    device: str  # as torch names it
    backend: str  # of the ops
    attention: str  # what `ops.attention` runs on
    worker: str  # the entry point of the other ranks
    streams_layers: bool  # whether layers are read as they compute; off by default: a CPU maps them, and keeps them all
    available_bytes: Callable[[], int]


def resolve(device: str, backend: str, *, streams_layers: bool = False) -> Platform:
    """The platform of a device; RequestError for one that is not there or not built."""
    if backend not in ops_backend.NAMES:
        raise RequestError(f"backend is {backend!r}, expected {' or '.join(ops_backend.NAMES)}")
    kind = device.partition(":")[0]
    if kind == "cpu" and device == "cpu":
        attention = "varlen_attention of our kernels" if backend == "native" else "torch"
        return Platform("cpu", backend, attention, WORKER, streams_layers, lambda: host_memory.available_bytes())
    if streams_layers and kind == "cuda":
        raise RequestError(f"device is {device!r}, where layers are not streamed (docs/platforms.md): expected cpu")
    if kind == "cuda":
        return _cuda(device, backend)
    if kind in NOT_BUILT:
        raise RequestError(f"device is {device!r}, which is not built (docs/platforms.md): expected cpu or cuda")
    raise RequestError(f"device is {device!r}, expected cpu or cuda")


def _cuda(device: str, backend: str) -> Platform:
    if backend != "torch":
        raise RequestError(f'device is {device!r} and backend {backend!r}: a GPU needs backend="torch"')
    if not torch.cuda.is_available():
        raise RequestError(f"device is {device!r}, but torch finds no such GPU here: expected cpu")
    return Platform(device, "torch", "torch", WORKER, False, lambda: torch.cuda.mem_get_info(device)[0])
