"""Selects the implementation of a thread's ops: the native kernels, or plain torch.

Both have the same signatures. An op in `ops/<family>.py` calls the native kernel; its plain torch version is the
function of the same name in `ops/torch_backend/<family>.py`. Weights and caches have the layout of the backend that was
active when they were created, and only that one reads them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from tilewright.ops.device import HOST, Device, named

NAMES = ("native", "torch")

Function = TypeVar("Function", bound=Callable[..., Any])


class _Active(threading.local):
    def __init__(self) -> None:  # per thread, on first use
        self.is_native = True
        self.place = HOST
        self.device = HOST.torch_device


_active = _Active()

# Every op by (family, name), which a backend must have.
OPS: dict[tuple[str, str], Callable[..., Any]] = {}


def activate(name: str, device: Device | torch.device | str = HOST) -> None:
    """Use the backend for ops that this thread calls from now on; tensors without inputs are created on `device`."""
    if name not in NAMES:
        raise ValueError(f"backend is {name!r}, expected {' or '.join(NAMES)}")
    place = device if isinstance(device, Device) else named(str(device))
    if name == "native" and place.torch_device.type != "cpu":
        raise ValueError(f"device is {place}, expected cpu: the native backend runs there only")
    _active.is_native, _active.place, _active.device = name == "native", place, place.torch_device


@contextlib.contextmanager
def use(name: str, device: Device | torch.device | str = HOST) -> Iterator[None]:
    """Activate the backend within a block."""
    before = active(), _active.place
    activate(name, device)
    try:
        yield
    finally:
        activate(*before)


def active() -> str:
    return "native" if _active.is_native else "torch"


def device() -> torch.device:
    """Return the torch device of tensors created without inputs: weights, caches, tables."""
    return _active.device


def place() -> Device:
    """Return that device as a Device, with the copies to it and back."""
    return _active.place


def op(native: Function) -> Function:
    """Wrap a native op so that the torch backend's version is called while that backend is active.

    The choice takes 0.2 us, where a kernel call takes 2 or more; a replayed step makes none.
    """
    family, name = native.__module__.rpartition(".")[2], native.__name__
    OPS[family, name] = native

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (native if _active.is_native else _in_torch(family, name))(*args, **kwargs)

    return cast(Function, call)


@functools.cache
def _in_torch(family: str, name: str) -> Callable[..., Any]:
    # Imported on the first call: torch_backend needs the classes defined beside the ops.
    return getattr(importlib.import_module(f"tilewright.ops.torch_backend.{family}"), name)
