"""The native module, loaded after torch and set up from the config, and the way tensors are handed to it."""

import torch  # first: the kernels then share torch's OpenMP runtime instead of bringing a second one
from torch.utils.dlpack import to_dlpack as view

from tilewright import _kernels as kernels
from tilewright import config

__all__ = ["kernels", "view", "view_or_none"]


def view_or_none(tensor: torch.Tensor | None) -> object:
    """The DLPack capsule of a tensor, None for None."""
    return None if tensor is None else view(tensor)


def _apply(settings: config.Config) -> None:
    kernels.set_max_isa(settings.max_isa)
    kernels.set_num_threads(settings.num_threads or 0)
    if settings.bind_cpus:
        kernels.bind_threads(list(settings.bind_cpus))


_apply(config.current())
