"""AutoencoderKLWan as Wan 2.1 and 2.2 have it, and AutoencoderKLQwenImage, which is Wan 2.1's by another name.

A clip goes through in pieces: its first frame, then as many frames as make one of the latents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.conv import CausalConv3d
from tilewright.layers.feature_memory import FeatureMemory
from tilewright.models.autoencoder_wan.blocks import (
    ChannelNorm,
    Downsampler,
    DownStage,
    History,
    MidBlock,
    ResidualBlock,
    Upsampler,
    UpStage,
)
from tilewright.models.autoencoder_wan.config import WanConfig
from tilewright.models.vae import check_shape
from tilewright.types import RequestError


class Encoder:
    """Mean and log variance of latents [B, t, h, w, 2 C] of a piece of a clip."""

    def __init__(self, config: WanConfig) -> None:
        widths = [config.encoder_width * multiplier for multiplier in (1, *config.multipliers)]
        self.conv_in = CausalConv3d("encoder.conv_in", config.in_channels, widths[0])
        self.stages = []
        index = 0
        for i, (before, width) in enumerate(itertools.pairwise(widths)):
            is_last = i == len(config.multipliers) - 1
            # Without shortcuts, blocks and steps of all stages are numbered through.
            prefix = f"encoder.down_blocks.{i}.resnets." if config.has_shortcuts else "encoder.down_blocks."
            first = 0 if config.has_shortcuts else index
            resnets = [
                ResidualBlock(f"{prefix}{first + layer}", width if layer else before, width)
                for layer in range(config.num_resnets)
            ]
            index += config.num_resnets
            step = None
            if not is_last:
                name = f"encoder.down_blocks.{i}.downsampler" if config.has_shortcuts else f"{prefix}{index}"
                step = Downsampler(name, width, halves_time=config.halves_time[i])
                index += 1
            self.stages.append(DownStage(resnets, step, width if config.has_shortcuts else None))
        self.mid = MidBlock("encoder.mid_block", widths[-1])
        self.norm_out = ChannelNorm("encoder.norm_out", widths[-1], activation="silu")
        self.conv_out = CausalConv3d("encoder.conv_out", widths[-1], 2 * config.latent_channels)

    def __call__(self, x: Tensor, history: History, memory: FeatureMemory) -> Tensor:
        x = history.convolve(self.conv_in, x, out=memory.take((*x.shape[:-1], self.conv_in.out_channels), x.dtype))
        for stage in self.stages:
            x = stage(x, history, memory)
        x = self.mid(x, history, memory)
        out = history.convolve(self.conv_out, self.norm_out(x, out=x))
        memory.give(x)
        return out


class Decoder:
    """A piece of a clip, of the latents [B, t, h, w, C] of it."""

    def __init__(self, config: WanConfig) -> None:
        widths = [config.decoder_width * multiplier for multiplier in config.multipliers[::-1]]
        self.conv_in = CausalConv3d("decoder.conv_in", config.latent_channels, widths[0])
        self.mid = MidBlock("decoder.mid_block", widths[0])
        self.stages = []
        before = widths[0]
        for i, width in enumerate(widths):
            name = f"decoder.up_blocks.{i}"
            resnets = [
                ResidualBlock(f"{name}.resnets.{layer}", width if layer else before, width)
                for layer in range(config.num_resnets + 1)
            ]
            step = None
            if i < len(widths) - 1:
                # Without shortcuts the step to the next stage halves the channels.
                before = width if config.has_shortcuts else width // 2
                step_name = f"{name}.upsampler" if config.has_shortcuts else f"{name}.upsamplers.0"
                step = Upsampler(step_name, width, before, doubles_time=config.halves_time[::-1][i])
            self.stages.append(UpStage(resnets, step, has_shortcut=config.has_shortcuts))
        self.norm_out = ChannelNorm("decoder.norm_out", widths[-1], activation="silu")
        self.conv_out = CausalConv3d("decoder.conv_out", widths[-1], config.out_channels)

    def __call__(self, z: Tensor, history: History, memory: FeatureMemory) -> Tensor:
        x = history.convolve(self.conv_in, z, out=memory.take((*z.shape[:-1], self.conv_in.out_channels), z.dtype))
        x = self.mid(x, history, memory)
        for stage in self.stages:
            x = stage(x, history, memory)
        out = history.convolve(self.conv_out, self.norm_out(x, out=x))
        memory.give(x)
        return out


class AutoencoderWan:
    """A `models.vae.Vae` of clips, and of pictures as clips of one frame."""

    def __init__(self, config: WanConfig) -> None:
        self.config = config
        self.latent_channels = config.latent_channels
        self.spatial_factor = config.spatial_factor
        self.temporal_factor = config.temporal_factor
        channels = config.latent_channels
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = CausalConv3d("quant_conv", 2 * channels, 2 * channels, (1, 1, 1))
        self.post_quant_conv = CausalConv3d("post_quant_conv", channels, channels, (1, 1, 1))

    def checkpoint_name(self, name: str) -> str | None:
        return name

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.value.packed.dtype

    def encode(self, x_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Latents [B, 1 + (T - 1) / 4, h, w, C] of a clip [B, T, H, W, 3] in [-1, 1]: the mode."""
        picture_channels = self.config.in_channels // self.config.patch_size**2
        check_shape("the clip to encode", x_BTHWC, picture_channels, self.spatial_factor)
        num_frames = x_BTHWC.shape[1]
        if (num_frames - 1) % self.temporal_factor:
            raise RequestError(
                f"the clip to encode has {num_frames} frames, expected 1 more than a multiple of {self.temporal_factor}"
            )
        x = patchify(x_BTHWC.to(self.dtype), self.config.patch_size).contiguous()
        memory = FeatureMemory()
        pieces = [
            self.quant_conv(self.encoder(piece, history, memory))
            for piece, history in pieces_of(x, self.temporal_factor)
        ]
        z = torch.cat(pieces, dim=1)[..., : self.latent_channels]
        return self.config.scale.normalize(z).to(self.dtype)

    def decode(self, latents_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """A clip [B, 1 + 4 (t - 1), H, W, 3] in [-1, 1] of latents [B, t, h, w, C]."""
        check_shape("latents", latents_BTHWC, self.latent_channels)
        z = self.post_quant_conv(self.config.scale.restore(latents_BTHWC).to(self.dtype).contiguous())
        memory = FeatureMemory()
        pieces = [self.decoder(piece, history, memory) for piece, history in pieces_of(z, 1)]
        return unpatchify(torch.cat(pieces, dim=1), self.config.patch_size).clamp_(-1, 1)


def pieces_of(x_BTHWC: Tensor, num_frames: int) -> Iterator[tuple[Tensor, History]]:
    """The first frame, then `num_frames` at a time, with the history of those before."""
    history = History()
    total = x_BTHWC.shape[1]
    for begin in (0, *range(1, total, num_frames)):
        end = begin + num_frames if begin else 1
        history.is_first, history.is_last = begin == 0, end >= total
        yield x_BTHWC[:, begin:end], history


def patchify(x_BTHWC: Tensor, side: int) -> Tensor:
    """[B, T, H / side, W / side, C side^2]: channel, column and row of a square, in this order."""
    if side == 1:
        return x_BTHWC
    squares = x_BTHWC.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # B, T, h, row, w, column, C
    return squares.permute(0, 1, 2, 4, 6, 5, 3).flatten(4)


def unpatchify(x_BTHWC: Tensor, side: int) -> Tensor:
    """What `patchify` was given."""
    if side == 1:
        return x_BTHWC
    squares = x_BTHWC.unflatten(4, (-1, side, side))  # B, T, h, w, C, column, row
    return squares.permute(0, 1, 2, 6, 3, 5, 4).flatten(4, 5).flatten(2, 3)


def build(config: Mapping[str, Any]) -> AutoencoderWan:
    """The network a config describes, its weights still to be loaded."""
    return AutoencoderWan(WanConfig.from_dict(config))
