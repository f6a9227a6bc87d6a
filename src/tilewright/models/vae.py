"""The interface of autoencoders to pipelines, and what autoencoders share.

Images and clips are [B, T, H, W, 3] in [-1, 1], latents [B, t, h, w, C], channels last; images have one frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewright.host import memory
from tilewright.ops import backend
from tilewright.types import RequestError


class Vae(Protocol):
    """An autoencoder whose latents are the transformer's: it shifts, scales and patchifies them itself."""

    latent_channels: int
    spatial_factor: int
    temporal_factor: int

    def encode(self, x_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Return latents [B, t, h, w, C] of images or clips [B, T, H, W, 3] in [-1, 1]: the mode, not a sample."""

    def decode(self, latents_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Return images or clips [B, T, H, W, 3] of latents [B, t, h, w, C].

        `tile` is the height in pixels of the parts that are in memory at a time; None: as the memory allows.
        """

    def checkpoint_name(self, name: str) -> str | None:
        """Return the network's name for a tensor of the checkpoint; None for an unused one."""


@dataclass(frozen=True)
class LatentScale:
    """The transformer's latents are (z - mean) / std of the encoder's z: one number, or one per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalize(self, z: Tensor) -> Tensor:
        return (z.float() - torch.tensor(self.mean, device=z.device)) / torch.tensor(self.std, device=z.device)

    def restore(self, latents: Tensor) -> Tensor:
        return latents.float() * torch.tensor(self.std, device=latents.device) + torch.tensor(
            self.mean, device=latents.device
        )


def memory_budget() -> float:
    """Return the bytes that whole maps may take: half of the free memory; on other devices no limit."""
    return memory.available_bytes() / 2 if backend.device().type == "cpu" else float("inf")


def check_tile(tile: int | None) -> None:
    """Raise RequestError unless `tile` is a number of pixels, or None."""
    if tile is not None and tile < 1:
        raise RequestError(f"tile is {tile}, expected 1 pixel or more")


def check_shape(what: str, x: Tensor, channels: int, multiple: int = 1) -> None:
    """Raise RequestError unless x is [B, T, H, W, channels] with sides that are multiples of `multiple`."""
    if x.dim() != 5 or x.shape[-1] != channels or x.numel() == 0:
        raise RequestError(f"{what} has shape {list(x.shape)}, expected [B, T, H, W, {channels}]")
    if x.shape[2] % multiple or x.shape[3] % multiple:
        raise RequestError(
            f"{what} is {x.shape[3]} x {x.shape[2]} pixels, expected multiples of {multiple}, the autoencoder's step"
        )
