"""AutoencoderKLWan of Wan 2.1 and 2.2, and AutoencoderKLQwenImage, which is Wan 2.1's under another name.

A clip is computed in pieces: its first frame, then as many frames as make one of the latents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.conv import CausalConv3d
from tilewright.layers.memory import FeatureMemory
from tilewright.models.autoencoder_wan.blocks import (
    ChannelNorm,
    Downsampler,
    FrameHistory,
    ResidualBlock,
    Upsampler,
    WanDownStage,
    WanMidBlock,
    WanUpStage,
    chosen_side,
    copied_out,
    in_tiles,
    pieces_of,
)
from tilewright.models.text_config import Config, integer
from tilewright.models.vae import LatentScale, check_shape, check_tile
from tilewright.types import RequestError, UnsupportedConfig

# Wan 2.1's, the defaults of both classes.
MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@dataclass(frozen=True)
class WanAutoencoderConfig:
    in_channels: int  # channels of the network's input: an image's times the patch's pixels
    out_channels: int
    latent_channels: int
    encoder_width: int
    decoder_width: int
    multipliers: tuple[int, ...]  # of the width in each stage, from the image to the latents
    num_resnets: int  # of an encoder stage; a decoder stage has one more
    halves_time: tuple[bool, ...]  # for each step between stages: whether it halves frames, beside rows and columns
    has_shortcuts: bool  # around whole stages, as in Wan 2.2
    patch_size: int
    scale: LatentScale

    @classmethod
    def from_dict(cls, config: Config) -> WanAutoencoderConfig:
        if config.get("attn_scales"):
            raise UnsupportedConfig(f"config has attn_scales {config['attn_scales']!r}, expected none")
        multipliers = _list(config, "dim_mult", int, (1, 2, 4, 4))
        halves_time = _list(config, "temperal_downsample", bool, (False, True, True))
        if len(halves_time) != len(multipliers) - 1:
            raise UnsupportedConfig(
                f"config has {len(halves_time)} temperal_downsample, expected {len(multipliers) - 1}, one less than "
                "dim_mult"
            )
        width = integer(config, "base_dim", 96)
        decoder_width = width if config.get("decoder_base_dim") is None else integer(config, "decoder_base_dim")
        latent_channels = integer(config, "z_dim", 16)
        mean = _list(config, "latents_mean", (int, float), MEAN)
        std = _list(config, "latents_std", (int, float), STD)
        for key, values in (("latents_mean", mean), ("latents_std", std)):
            if len(values) != latent_channels:
                raise UnsupportedConfig(f"config has {len(values)} {key}, expected {latent_channels}, its z_dim")
        image_channels = integer(config, "input_channels", 3)  # Qwen-Image's name for channels of input and output
        return cls(
            in_channels=integer(config, "in_channels", image_channels),
            out_channels=integer(config, "out_channels", image_channels),
            latent_channels=latent_channels,
            encoder_width=width,
            decoder_width=decoder_width,
            multipliers=multipliers,
            num_resnets=integer(config, "num_res_blocks", 2),
            halves_time=halves_time,
            has_shortcuts=bool(config.get("is_residual", False)),
            patch_size=1 if config.get("patch_size") is None else integer(config, "patch_size"),
            scale=LatentScale(tuple(map(float, mean)), tuple(map(float, std))),
        )

    @property
    def temporal_factor(self) -> int:
        return 2 ** sum(self.halves_time)

    @property
    def spatial_factor(self) -> int:
        return 2 ** len(self.halves_time) * self.patch_size


def _list(config: Config, key: str, kind: type | tuple[type, ...], default: tuple) -> tuple:
    value = config.get(key, default)
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, kind) for item in value):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected a list")
    return tuple(value)


class WanEncoder:
    """Maps a piece of a clip to mean and log variance of latents [B, t, h, w, 2 C]."""

    def __init__(self, config: WanAutoencoderConfig) -> None:
        widths = [config.encoder_width * multiplier for multiplier in (1, *config.multipliers)]
        self.conv_in = CausalConv3d("encoder.conv_in", config.in_channels, widths[0])
        self.stages = []
        index = 0
        for i, (before, width) in enumerate(itertools.pairwise(widths)):
            is_last = i == len(config.multipliers) - 1
            # Without shortcuts, the blocks and steps of all stages are numbered consecutively.
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
            self.stages.append(WanDownStage(resnets, step, width if config.has_shortcuts else None))
        self.mid = WanMidBlock("encoder.mid_block", widths[-1])
        self.widths = tuple(widths[1:])
        self.norm_out = ChannelNorm("encoder.norm_out", widths[-1], activation="silu")
        self.conv_out = CausalConv3d("encoder.conv_out", widths[-1], 2 * config.latent_channels)

    def large(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        """Run the stages that make a piece smaller, in which a pixel sees its neighbourhood."""
        x = history.convolve(self.conv_in, x, out=memory.empty((*x.shape[:-1], self.conv_in.out_channels), x.dtype))
        for stage in self.stages[:-1]:
            x = stage(x, history, memory)
        return x

    def small(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        """Run the rest, in which a pixel sees all others."""
        x = self.mid(self.stages[-1](x, history, memory), history, memory)
        out = history.convolve(self.conv_out, self.norm_out(x, out=x))
        memory.free(x)
        return out

    def reach(self) -> int:
        """Return how many pixels beyond its own square a pixel of the result of `large` sees."""
        reach = 0
        for stage in self.stages[-2::-1]:
            reach = 2 * reach + 2 + 2 * len(stage.resnets)
        return reach + 1


class WanDecoder:
    """Maps latents [B, t, h, w, C] to a piece of a clip."""

    def __init__(self, config: WanAutoencoderConfig) -> None:
        widths = [config.decoder_width * multiplier for multiplier in config.multipliers[::-1]]
        self.conv_in = CausalConv3d("decoder.conv_in", config.latent_channels, widths[0])
        self.mid = WanMidBlock("decoder.mid_block", widths[0])
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
                # Without shortcuts, the step to the next stage halves the channels.
                before = width if config.has_shortcuts else width // 2
                step_name = f"{name}.upsampler" if config.has_shortcuts else f"{name}.upsamplers.0"
                step = Upsampler(step_name, width, before, doubles_time=config.halves_time[::-1][i])
            self.stages.append(WanUpStage(resnets, step, has_shortcut=config.has_shortcuts))
        self.widths = tuple(widths[::-1])
        self.norm_out = ChannelNorm("decoder.norm_out", widths[-1], activation="silu")
        self.conv_out = CausalConv3d("decoder.conv_out", widths[-1], config.out_channels)

    @property
    def num_small(self) -> int:
        """Number of stages with small maps: the first one, unless it is the only one."""
        return min(1, len(self.stages) - 1)

    def small(self, z: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        """Run the layers in which a pixel sees all others, and the first stage."""
        x = history.convolve(self.conv_in, z, out=memory.empty((*z.shape[:-1], self.conv_in.out_channels), z.dtype))
        x = self.mid(x, history, memory)
        for stage in self.stages[: self.num_small]:
            x = stage(x, history, memory)
        return x

    def large(self, x: Tensor, history: FrameHistory, memory: FeatureMemory) -> Tensor:
        """Run the other stages, in which a pixel sees its neighbourhood."""
        for stage in self.stages[self.num_small :]:
            x = stage(x, history, memory)
        out = history.convolve(self.conv_out, self.norm_out(x, out=x))
        memory.free(x)
        return out

    def reach(self) -> int:
        """Return how many pixels around an input pixel of `large` its output pixels see."""
        reach = 1
        for stage in reversed(self.stages[self.num_small :]):
            if stage.step is not None:
                reach = (reach + 2) // 2
            reach += 2 * len(stage.resnets)
        return reach


class AutoencoderWan:
    """A `models.vae.Vae` of clips, and of images as clips of one frame."""

    def __init__(self, config: WanAutoencoderConfig) -> None:
        self.config = config
        self.latent_channels = config.latent_channels
        self.spatial_factor = config.spatial_factor
        self.temporal_factor = config.temporal_factor
        channels = config.latent_channels
        self.encoder = WanEncoder(config)
        self.decoder = WanDecoder(config)
        self.quant_conv = CausalConv3d("quant_conv", 2 * channels, 2 * channels, (1, 1, 1))
        self.post_quant_conv = CausalConv3d("post_quant_conv", channels, channels, (1, 1, 1))

    def checkpoint_name(self, name: str) -> str | None:
        return name

    @property
    def dtype(self) -> torch.dtype:
        return self.quant_conv.weight.value.packed.dtype

    def encode(self, x_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Return latents [B, 1 + (T - 1) / 4, h, w, C] of a clip [B, T, H, W, 3] in [-1, 1]: the mode.

        `tile` is the side of the tiles in which the large maps are computed, in pixels; None: as the memory allows.
        """
        image_channels = self.config.in_channels // self.config.patch_size**2
        check_shape("the clip to encode", x_BTHWC, image_channels, self.spatial_factor)
        num_frames = x_BTHWC.shape[1]
        if (num_frames - 1) % self.temporal_factor:
            raise RequestError(
                f"the clip to encode has {num_frames} frames, expected 1 more than a multiple of {self.temporal_factor}"
            )
        x = patchify(x_BTHWC.to(self.dtype), self.config.patch_size).contiguous()
        step = self.spatial_factor // self.config.patch_size
        side = self._side(tile, x, self.encoder)
        memory = FeatureMemory()
        pieces: Iterable[tuple[Tensor, FrameHistory]]
        if side is None:
            pieces = (
                (self.encoder.large(piece, history, memory), history)
                for piece, history in pieces_of(x, self.temporal_factor)
            )
        else:
            small = in_tiles(
                self.encoder.large,
                x,
                num_frames=self.temporal_factor,
                side=side,
                reach=self.encoder.reach(),
                step=step,
                growth=Fraction(1, step),
            )
            pieces = pieces_of(small, 1)
        z = torch.cat([self.quant_conv(self.encoder.small(piece, history, memory)) for piece, history in pieces], dim=1)
        return self.config.scale.normalize(z[..., : self.latent_channels]).to(self.dtype)

    def decode(self, latents_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Return a clip [B, 1 + 4 (t - 1), H, W, 3] in [-1, 1] of latents [B, t, h, w, C]; `tile` as for `encode`."""
        check_shape("latents", latents_BTHWC, self.latent_channels)
        z = self.post_quant_conv(self.config.scale.restore(latents_BTHWC).to(self.dtype).contiguous())
        memory = FeatureMemory()
        decoder = self.decoder
        growth = self.spatial_factor // self.config.patch_size >> decoder.num_small
        side = self._side(tile, z, decoder)
        if side is None:
            pieces = [
                decoder.large(decoder.small(piece, history, memory), history, memory)
                for piece, history in pieces_of(z, 1)
            ]
            clip = torch.cat(pieces, dim=1)
        else:
            maps = [copied_out(memory, decoder.small(piece, history, memory)) for piece, history in pieces_of(z, 1)]
            clip = in_tiles(
                decoder.large,
                torch.cat(maps, dim=1),
                num_frames=maps[-1].shape[1],
                side=max(side // growth, 1),
                reach=decoder.reach(),
                step=1,
                growth=Fraction(growth),
            )
        return unpatchify(clip, self.config.patch_size).clamp_(-1, 1)

    def _side(self, tile: int | None, x: Tensor, network: WanEncoder | WanDecoder) -> int | None:
        """Return the side of tiles, in pixels of the network's largest maps; None for no tiles."""
        check_tile(tile)
        if tile is not None:
            return max(tile // self.config.patch_size, 1)
        is_decoder = network is self.decoder
        scale = self.spatial_factor // self.config.patch_size if is_decoder else 1
        pixels = x.shape[2] * x.shape[3] * scale**2
        num_frames = 1 if x.shape[1] == 1 else self.temporal_factor
        reach = network.reach() * (scale >> self.decoder.num_small if is_decoder else 1)
        num_resnets = len(network.stages[0].resnets)
        return chosen_side(pixels, len(x), network.widths, num_resnets, num_frames, reach, x.element_size())


def patchify(x_BTHWC: Tensor, side: int) -> Tensor:
    """Return squares as channels [B, T, H / side, W / side, C side^2], ordered by channel, column and row."""
    if side == 1:
        return x_BTHWC
    squares = x_BTHWC.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # B, T, h, row, w, column, C
    return squares.permute(0, 1, 2, 4, 6, 5, 3).flatten(4)


def unpatchify(x_BTHWC: Tensor, side: int) -> Tensor:
    """Invert `patchify`."""
    if side == 1:
        return x_BTHWC
    squares = x_BTHWC.unflatten(4, (-1, side, side))  # B, T, h, w, C, column, row
    return squares.permute(0, 1, 2, 6, 3, 5, 4).flatten(4, 5).flatten(2, 3)


def build(config: Mapping[str, Any]) -> AutoencoderWan:
    """Return the network that a config describes, without weights."""
    return AutoencoderWan(WanAutoencoderConfig.from_dict(config))
