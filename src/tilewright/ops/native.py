"""The native module, loaded after torch and set up from the config, and the way tensors are handed to it."""

import os

import torch  # first: the kernels then share torch's OpenMP runtime instead of bringing a second one
from torch.utils.dlpack import to_dlpack as view

from tilewright import _kernels as kernels
from tilewright import config

__all__ = ["bind_team", "kernels", "view", "view_or_none", "work_alone"]


def view_or_none(tensor: torch.Tensor | None) -> object:
    """The DLPack capsule of a tensor, None for None."""
    return None if tensor is None else view(tensor)


def bind_team() -> None:
    """Pins the threads of kernels that this thread calls, as the config says: every calling thread has its own team."""
    if config.current().bind_cpus:
        kernels.bind_threads(list(config.current().bind_cpus))


def work_alone() -> None:
    """From now on kernels that this thread calls use no other thread, and it runs where it likes."""
    kernels.work_alone()
    if config.current().bind_cpus:  # a new thread has the place of the pinned one that started it
        os.sched_setaffinity(0, config.current().available_cpus)


def _apply(settings: config.Config) -> None:
    kernels.set_max_isa(settings.max_isa)
    kernels.set_num_threads(settings.num_threads or 0)
    bind_team()


_apply(config.current())
