"""AutoencoderKL as Flux, Z-Image and Stable Diffusion have it, and AutoencoderKLFlux2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.conv import Conv2d, UpsampleConv2d
from tilewright.layers.feature_memory import FeatureMemory
from tilewright.layers.group_norm import GroupNorm
from tilewright.models.autoencoder_kl.blocks import EPS, DownStage, MidBlock, UpStage, resnets_of
from tilewright.models.autoencoder_kl.config import AutoencoderConfig
from tilewright.models.vae import check_shape, check_tile, memory_budget
from tilewright.weights.unpacked import Unpacked

# Names that early checkpoints have for the parts of attention.
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
# Of the picture, in a band that memory asks for: two rows more on each side are computed again for each.
BAND_ROWS = 128


class Encoder:
    """Mean and log variance of latents [1, h, w, 2 C] of a picture [1, H, W, 3]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        widths, groups = config.encoder_widths, config.num_groups
        self.conv_in = Conv2d("encoder.conv_in", config.in_channels, widths[0])
        self.stages = []
        for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            name = f"encoder.down_blocks.{i}"
            # Zeros below and to the right alone: a row and a column more, of which every other pixel is taken.
            down = Conv2d(f"{name}.downsamplers.0.conv", width, width, stride=2, padding=(0, 1, 0, 1))
            is_last = i == len(widths) - 1
            resnets = resnets_of(name, before, width, config.layers_per_block, groups)
            self.stages.append(DownStage(resnets, None if is_last else down))
        self.mid = MidBlock("encoder.mid_block", widths[-1], groups, config.has_mid_attention)
        self.norm_out = GroupNorm("encoder.conv_norm_out", widths[-1], groups, EPS, activation="silu")
        self.conv_out = Conv2d("encoder.conv_out", widths[-1], 2 * config.latent_channels)

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        x = self.conv_in(x, out=memory.take((*x.shape[:-1], self.conv_in.out_channels), x.dtype))
        for stage in self.stages:
            x = stage(x, memory)
        x = self.mid(x, memory)
        result = self.conv_out(x, norm=self.norm_out.table(self.norm_out.statistics(x)))
        memory.give(x)
        return result


class Decoder:
    """A picture [1, H, W, 3] of latents [1, h, w, C]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        widths, groups = config.decoder_widths[::-1], config.num_groups
        self.conv_in = Conv2d("decoder.conv_in", config.latent_channels, widths[0])
        self.mid = MidBlock("decoder.mid_block", widths[0], groups, config.has_mid_attention)
        self.stages = []
        for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            # A checkpoint has the step to a stage with the stage before it.
            step = UpsampleConv2d(f"decoder.up_blocks.{i - 1}.upsamplers.0.conv", before, before) if i else None
            resnets = resnets_of(f"decoder.up_blocks.{i}", before, width, config.layers_per_block + 1, groups)
            self.stages.append(UpStage(resnets, step))
        self.norm_out = GroupNorm("decoder.conv_norm_out", widths[-1], groups, EPS, activation="silu")
        self.conv_out = Conv2d("decoder.conv_out", widths[-1], config.out_channels)
        self.widths = widths

    def __call__(self, z: Tensor, memory: FeatureMemory, tile: int | None) -> Tensor:
        """`tile`: rows of the picture in a band; None for whole maps."""
        x = self.conv_in(z, out=memory.take((*z.shape[:-1], self.conv_in.out_channels), z.dtype))
        x = self.mid(x, memory)
        for i, stage in enumerate(self.stages):
            x = stage(x, memory, None if tile is None else max(tile >> (len(self.stages) - 1 - i), 2))
        result = self.conv_out(x, norm=self.norm_out.table(self.norm_out.statistics(x)))
        memory.give(x)
        return result

    def map_channels(self) -> int:
        """Of the maps that are in memory at once, at most, per pixel of the picture."""
        steps = zip((self.widths[0], *self.widths), self.widths, strict=False)
        return max((before + 2 * width) >> 2 * (len(self.widths) - 1 - i) for i, (before, width) in enumerate(steps))


class AutoencoderKL:
    """A `models.vae.Vae` of pictures: frames of a clip are pictures of their own."""

    temporal_factor = 1

    def __init__(self, config: AutoencoderConfig) -> None:
        self.config = config
        self.latent_channels = config.latent_channels * config.patch_size**2
        self.spatial_factor = 2**config.num_halvings * config.patch_size
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        channels = config.latent_channels
        self.quant_conv = Conv2d("quant_conv", 2 * channels, 2 * channels, 1) if config.has_quant_conv else None
        self.post_quant_conv = Conv2d("post_quant_conv", channels, channels, 1) if config.has_post_quant_conv else None
        self.scale = config.scale or BatchStatistics(self.latent_channels, config.batch_norm_eps)

    def checkpoint_name(self, name: str) -> str | None:
        if name == "bn.num_batches_tracked":  # of training
            return None
        *parts, part, kind = name.split(".")
        return ".".join((*parts, OLD_NAMES.get(part, part), kind)) if "attentions" in parts else name

    def encode(self, x_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Latents [B, T, h, w, C] of pictures [B, T, H, W, 3] in [-1, 1]: the mode.

        `tile` changes nothing: there is no map in memory that is not needed whole.
        """
        check_shape("the picture to encode", x_BTHWC, self.config.in_channels)
        x = x_BTHWC.flatten(0, 1).to(self.encoder.conv_in.dtype).contiguous()
        memory = FeatureMemory()
        z = torch.cat([self.encoder(picture, memory) for picture in x.split(1)])
        if self.quant_conv is not None:
            z = self.quant_conv(z)
        z = patchify(z[..., : self.config.latent_channels], self.config.patch_size)
        return self.scale.normalize(z).to(x.dtype).unflatten(0, x_BTHWC.shape[:2])

    def decode(self, latents_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Pictures [B, T, H, W, 3] of latents [B, T, h, w, C], one after the other.

        `tile`: the largest maps are computed in bands of so many rows of the picture; None: if memory asks for it.
        """
        check_shape("latents", latents_BTHWC, self.latent_channels)
        check_tile(tile)
        z = self.scale.restore(latents_BTHWC.flatten(0, 1))
        z = unpatchify(z, self.config.patch_size).to(self.decoder.conv_in.dtype).contiguous()
        if self.post_quant_conv is not None:
            z = self.post_quant_conv(z)
        if tile is None:
            tile = self._chosen_tile(z)
        memory = FeatureMemory()
        pictures = torch.cat([self.decoder(item, memory, tile) for item in z.split(1)])
        return pictures.unflatten(0, latents_BTHWC.shape[:2])

    def _chosen_tile(self, z: Tensor) -> int | None:
        pixels = z.shape[1] * z.shape[2] * 4**self.config.num_halvings
        return BAND_ROWS if pixels * self.decoder.map_channels() * z.element_size() > memory_budget() else None


class BatchStatistics:
    """Mean and variance that training measured of each channel of patchified latents."""

    def __init__(self, channels: int, eps: float) -> None:
        self.eps = eps
        self.mean = Unpacked("bn.running_mean", channels, in_fp32=True)
        self.variance = Unpacked("bn.running_var", channels, in_fp32=True)

    def normalize(self, z: Tensor) -> Tensor:
        return (z.float() - self.mean.value) / torch.sqrt(self.variance.value + self.eps)

    def restore(self, latents: Tensor) -> Tensor:
        return latents.float() * torch.sqrt(self.variance.value + self.eps) + self.mean.value


def patchify(z_BHWC: Tensor, side: int) -> Tensor:
    """[B, H / side, W / side, C side^2]: channel, row and column of a square, in this order."""
    if side == 1:
        return z_BHWC
    squares = z_BHWC.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # B, H / side, side, W / side, side, C
    return squares.permute(0, 1, 3, 5, 2, 4).flatten(3)


def unpatchify(z_BHWC: Tensor, side: int) -> Tensor:
    """What `patchify` was given."""
    if side == 1:
        return z_BHWC
    squares = z_BHWC.unflatten(3, (-1, side, side))  # B, h, w, C, side, side
    return squares.permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2)


def build(config: Mapping[str, Any]) -> AutoencoderKL:
    """The network a config describes, its weights still to be loaded."""
    return AutoencoderKL(AutoencoderConfig.from_dict(config))
