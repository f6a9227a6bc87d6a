"""Classifier-free guidance: away from what the model makes of the negative prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def guided(positive: Tensor, negative: Tensor, scale: float, max_norm: float = 0.0) -> Tensor:
    """positive + scale * (positive - negative), fp32 [n, ...].

    With `max_norm`, no picture's result is longer than so many times its positive: strong guidance burns colours.
    """
    result = positive + scale * (positive - negative)
    if max_norm:
        bound = max_norm * _norms(positive)
        result *= (bound / _norms(result).clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    return result


def _norms(x: Tensor) -> Tensor:
    """Of each picture, in the shape that multiplies it."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, *(1 for _ in x.shape[1:]))
