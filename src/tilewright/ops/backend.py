"""Which implementation the ops of a thread have: the native kernels, or plain torch.

Both take the same calls. An op in `ops/<family>.py` is its native call; in plain torch it is the function of the same
name and signature in `ops/torch_backend/<family>.py`. Weights and caches are laid out for the backend that is active
when they are made, and only that one reads them.
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
    def __init__(self) -> None:  # for each thread, when it asks first
        self.is_native = True
        self.place = HOST
        self.device = HOST.torch_device


_active = _Active()

# Every op by (family, name): what a backend must have.
OPS: dict[tuple[str, str], Callable[..., Any]] = {}


def activate(name: str, device: Device | torch.device | str = HOST) -> None:
    """Ops that this thread calls from now on are those of the backend; tensors without inputs are made on `device`."""
    if name not in NAMES:
        raise ValueError(f"backend is {name!r}, expected {' or '.join(NAMES)}")
    place = device if isinstance(device, Device) else named(str(device))
    if name == "native" and place.torch_device.type != "cpu":
        raise ValueError(f"device is {place}, expected cpu: the native backend runs there only")
    _active.is_native, _active.place, _active.device = name == "native", place, place.torch_device


@contextlib.contextmanager
def use(name: str, device: Device | torch.device | str = HOST) -> Iterator[None]:
    """The same within a block."""
    before = active(), _active.place
    activate(name, device)
    try:
        yield
    finally:
        activate(*before)


def active() -> str:
    return "native" if _active.is_native else "torch"


def device() -> torch.device:
    """Where tensors are made that no input says the place of: weights, caches, tables."""
    return _active.device


def place() -> Device:
    """The same with the copies to it and back."""
    return _active.place


def op(native: Function) -> Function:
    """The function for the native backend, and its counterpart of torch_backend while that is active.

    The choice takes 0.2 us, where the call of a kernel takes 2 and more; a replayed step makes none.
    """
    family, name = native.__module__.rpartition(".")[2], native.__name__
    OPS[family, name] = native

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (native if _active.is_native else _in_torch(family, name))(*args, **kwargs)

    return cast(Function, call)


@functools.cache
def _in_torch(family: str, name: str) -> Callable[..., Any]:
    # Imported at the first call: torch_backend itself needs the classes that lie beside the ops.
    return getattr(importlib.import_module(f"tilewright.ops.torch_backend.{family}"), name)
