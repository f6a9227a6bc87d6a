"""The native module, loaded after torch, and the way tensors are handed to it."""

import torch  # noqa: F401  first: the kernels then share torch's OpenMP runtime instead of bringing a second one
from torch.utils.dlpack import to_dlpack as view

from tilewright import _kernels as kernels

__all__ = ["kernels", "view", "view_or_none"]


def view_or_none(tensor: torch.Tensor | None) -> object:
    """The DLPack capsule of a tensor, None for None."""
    return None if tensor is None else view(tensor)
