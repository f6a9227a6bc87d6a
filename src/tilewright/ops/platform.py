"""Everything that depends on the device a model computes on.

A platform has the backend of the ops and its device, the kind of attention, the free memory, the entry point of other
ranks, and whether layers are streamed. The engine, pipelines and networks ask nothing else about the machine.
docs/devices.md has what other devices would need.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright.host import memory
from tilewright.ops import backend as ops_backend
from tilewright.ops import device as ops_device
from tilewright.ops.device import HOST, Device
from tilewright.types import RequestError

WORKER = "tilewright.diffusion.ranks:main"
NOT_BUILT = ("mps", "xpu", "npu")


@dataclass(frozen=True)
class Platform:
    device: str  # in torch's form, with the index of a GPU
    backend: str  # of the ops
    attention: str  # implementation of `ops.attention`
    worker: str  # entry point of the other ranks
    streams_layers: bool  # whether layers are read as they compute; off by default: a CPU maps them, and keeps them all
    available_bytes: Callable[[], int]
    place: Device = HOST  # the memory of the device, and the copies to it

    def require_one_rank(self, tp: int | str) -> None:
        """Raise RequestError for several ranks on a device: they are processes of CPUs."""
        if not self.place.is_host and tp != 1:
            raise RequestError(f"tp is {tp} and device {self.device}, expected 1: ranks are processes of CPUs")

    def require_room(self, what: str, num_bytes: int) -> None:
        """Raise RequestError if the device lacks memory for `num_bytes` more; a host maps what does not fit."""
        free = self.available_bytes()
        if not self.place.is_host and num_bytes > free:
            raise RequestError(
                f"{what} take {num_bytes / 1e9:.1f} GB, and {self.device} has {free / 1e9:.1f} GB free: expected a "
                "smaller model, or a device with more memory"
            )


def resolve(device: str, backend: str | None = None, *, streams_layers: bool = False) -> Platform:
    """Return the platform of a device; RequestError if it is missing or not supported.

    `backend`: None for the device's default.
    """
    if backend is not None and backend not in ops_backend.NAMES:
        raise RequestError(f"backend is {backend!r}, expected {' or '.join(ops_backend.NAMES)}")
    kind = device.partition(":")[0]
    if device == "cpu":
        backend = backend or "native"
        attention = "varlen_attention of our kernels" if backend == "native" else "torch"
        return Platform("cpu", backend, attention, WORKER, streams_layers, lambda: memory.available_bytes())
    if streams_layers and kind == "cuda":
        raise RequestError(f"device is {device!r}, where layers are not streamed (docs/devices.md): expected cpu")
    if re.fullmatch(r"cuda(:\d+)?", device):
        return _cuda(device, backend)
    if kind in NOT_BUILT:
        raise RequestError(f"device is {device!r}, which is not supported (docs/devices.md): expected cpu or cuda")
    raise RequestError(f"device is {device!r}, expected cpu, cuda or cuda:N")


def _cuda(device: str, backend: str | None) -> Platform:
    if backend == "native":
        raise RequestError(f'device is {device!r} and backend {backend!r}: a GPU needs backend="torch"')
    index = int(device.partition(":")[2] or 0)
    _require_gpu(device, index)
    own = f"cuda:{index}"
    place = ops_device.named(own)
    return Platform(own, "torch", "flash", WORKER, False, lambda: torch.cuda.mem_get_info(index)[0], place)


def _require_gpu(device: str, index: int) -> None:
    """Raise RequestError, in one line with a hint, if torch cannot use the GPU."""
    if torch.version.cuda is None:
        raise RequestError(
            f"device is {device!r}, and this torch ({torch.__version__}) was built without CUDA: install a torch for "
            "CUDA, or use cpu"
        )
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        hint = f"a driver for CUDA {torch.version.cuda} or newer" if "driver" in reason.lower() else "a GPU, or cpu"
        raise RequestError(f"device is {device!r}, which torch cannot use: {reason}; expected {hint}") from error
    if index >= count:
        expected = "cpu: there is none" if not count else "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise RequestError(f"device is {device!r}, expected {expected}")
