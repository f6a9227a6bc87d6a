"""AutoencoderKL of Flux, Z-Image and Stable Diffusion, and AutoencoderKLFlux2: config, blocks, model.

An image is [1, H, W, C], normed over all its pixels. A convolution applies the norm of its input (`NormTable`), so
that only maps that are read twice are stored. Missing config entries have diffusers' defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.conv import Conv2d, UpsampleConv2d
from tilewright.layers.linear import Linear
from tilewright.layers.memory import FeatureMemory
from tilewright.layers.norm import GroupNorm, NormTable
from tilewright.models.text_config import Config, integer, number
from tilewright.models.vae import LatentScale, check_shape, check_tile, memory_budget
from tilewright.ops.attention import varlen_attention
from tilewright.types import UnsupportedConfig
from tilewright.weights.conv import Unpacked


@dataclass(frozen=True)
class AutoencoderConfig:
    in_channels: int
    out_channels: int
    latent_channels: int
    encoder_widths: tuple[int, ...]  # channels of each block, from the image to the latents
    decoder_widths: tuple[int, ...]  # in the same order
    layers_per_block: int
    num_groups: int
    has_quant_conv: bool
    has_post_quant_conv: bool
    has_mid_attention: bool
    scale: LatentScale | None  # None: statistics in the checkpoint, as in FLUX.2
    batch_norm_eps: float  # of those statistics
    patch_size: int  # side of the square of latents that is one token of the transformer

    @classmethod
    def from_dict(cls, config: Config) -> AutoencoderConfig:
        is_flux2 = config.get("_class_name") == "AutoencoderKLFlux2"
        flux2_widths = (128, 256, 512, 512)
        widths = _integers(config, "block_out_channels", flux2_widths if is_flux2 else (64,))
        num_groups = integer(config, "norm_num_groups", 32)
        decoder_widths = widths
        if config.get("decoder_block_out_channels") is not None:
            decoder_widths = _integers(config, "decoder_block_out_channels", widths)
        for key, block, count in (
            ("down_block_types", "DownEncoderBlock2D", len(widths)),
            ("up_block_types", "UpDecoderBlock2D", len(decoder_widths)),
        ):
            _check_blocks(config, key, block, count)
        for width in (*widths, *decoder_widths):
            if width % num_groups:
                raise UnsupportedConfig(
                    f"config has norm_num_groups {num_groups}, expected a divisor of its block_out_channels, {width}"
                )
        activation = config.get("act_fn", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedConfig(f"config has act_fn {activation!r}, expected silu")
        latent_channels = integer(config, "latent_channels", 32 if is_flux2 else 4)
        return cls(
            in_channels=integer(config, "in_channels", 3),
            out_channels=integer(config, "out_channels", 3),
            latent_channels=latent_channels,
            encoder_widths=widths,
            decoder_widths=decoder_widths,
            layers_per_block=integer(config, "layers_per_block", 2 if is_flux2 else 1),
            num_groups=num_groups,
            has_quant_conv=bool(config.get("use_quant_conv", True)),
            has_post_quant_conv=bool(config.get("use_post_quant_conv", True)),
            has_mid_attention=bool(config.get("mid_block_add_attention", True)),
            scale=None if is_flux2 else _scale(config, latent_channels),
            batch_norm_eps=number(config, "batch_norm_eps", 1e-4),
            patch_size=_patch_size(config) if is_flux2 else 1,
        )

    @property
    def num_halvings(self) -> int:
        """Number of times that rows and columns are halved, from the image to the latents."""
        return len(self.encoder_widths) - 1


def _integers(config: Config, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = config.get(key, default)
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, int) for item in value):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected whole numbers")
    return tuple(value)


def _check_blocks(config: Config, key: str, expected: str, count: int) -> None:
    """Raise UnsupportedConfig unless config[key] names `expected` `count` times."""
    blocks = config.get(key, (expected,) * count)
    assert isinstance(blocks, Sequence)
    for block in blocks:
        if block != expected:
            raise UnsupportedConfig(f"config has {block!r} in {key}, expected {expected}")
    if len(blocks) != count:
        raise UnsupportedConfig(f"config has {len(blocks)} {key}, expected {count}, as many as block_out_channels")


def _scale(config: Config, channels: int) -> LatentScale:
    """Return latents = (z - shift) * factor, or the config's per-channel statistics, of z / factor."""
    factor = number(config, "scaling_factor", 0.18215)
    shift = 0.0 if config.get("shift_factor") is None else number(config, "shift_factor", 0.0)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return LatentScale((shift,), (1.0 / factor,))
    for key, values in (("latents_mean", mean), ("latents_std", std)):
        if not isinstance(values, (list, tuple)) or len(values) != channels:
            raise UnsupportedConfig(f"config has {key} {values!r}, expected {channels} numbers, one per channel")
    assert isinstance(mean, (list, tuple)) and isinstance(std, (list, tuple))
    return LatentScale(tuple(map(float, mean)), tuple(float(value) / factor for value in std))


def _patch_size(config: Config) -> int:
    size = config.get("patch_size", (2, 2))
    if not isinstance(size, (list, tuple)) or len(size) != 2 or size[0] != size[1] or not isinstance(size[0], int):
        raise UnsupportedConfig(f"config has patch_size {size!r}, expected two equal whole numbers")
    return size[0]


EPS = 1e-6


class ResnetBlock:
    """shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x)))))), where the shortcut is x if it has as many channels."""

    def __init__(self, name: str, in_channels: int, out_channels: int, num_groups: int) -> None:
        self.norm1 = GroupNorm(f"{name}.norm1", in_channels, num_groups, EPS, activation="silu")
        self.conv1 = Conv2d(f"{name}.conv1", in_channels, out_channels)
        self.norm2 = GroupNorm(f"{name}.norm2", out_channels, num_groups, EPS, activation="silu")
        self.conv2 = Conv2d(f"{name}.conv2", out_channels, out_channels)
        self.shortcut = (
            Conv2d(f"{name}.conv_shortcut", in_channels, out_channels, 1) if in_channels != out_channels else None
        )

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        """Return the block's result, which may lie in x's memory: the block frees or overwrites x."""
        shape = (*x.shape[:-1], self.conv1.out_channels)
        inner = self.conv1(x, norm=self.norm1.table(self.norm1.statistics(x)), out=memory.empty(shape, x.dtype))
        out = x
        if self.shortcut is not None:
            out = self.shortcut(x, out=memory.empty(shape, x.dtype))
            memory.free(x)
        return self._finish(inner, out, memory)

    def upsampled(self, x: Tensor, step: UpsampleConv2d, band_rows: int, memory: FeatureMemory) -> Tensor:
        """Return the block's result for step(x), computed in bands of rows, so that step(x) is never whole in memory.

        Each band of step(x) is computed twice: for its statistics, then for the block.
        """
        _, rows, columns, _ = x.shape
        shape = (1, 2 * rows, 2 * columns, self.conv1.out_channels)
        bands = list(bands_of(rows, max(band_rows // 2, 1)))
        inner = memory.empty(shape, x.dtype)
        # Maps that are not read yet leave room for a band.
        largest = memory.empty((1, 2 * (bands[0][1] + 2), 2 * columns, step.out_channels), x.dtype)

        def band_of(begin: int, end: int) -> Tensor:
            return step(x, rows=(begin, end), out=largest[:, : 2 * (end - begin)])

        norm = self.norm1.table(
            merged_statistics([(end - begin, self.norm1.statistics(band_of(begin, end))) for begin, end in bands])
        )
        out = memory.empty(shape, x.dtype)
        for begin, end in bands:
            self._enter_band(band_of(max(begin - 1, 0), min(end + 1, rows)), (begin, end), rows, norm, inner, out)
        memory.free(largest)
        memory.free(x)
        return self._finish(inner, out, memory)

    def _enter_band(
        self, band: Tensor, rows: tuple[int, int], num_rows: int, norm: NormTable, inner: Tensor, out: Tensor
    ) -> None:
        """Run conv1 and the shortcut on rows of step(x), given with one more row of x on each side that has one."""
        begin, end = rows
        top, bottom = int(begin == 0), int(end == num_rows)
        here = slice(2 * begin, 2 * end)
        own = band[:, 2 * (1 - top) : band.shape[1] - 2 * (1 - bottom)]
        seen = band[:, 1 - top : band.shape[1] - 1 + bottom]
        self.conv1(seen, norm=norm, padding=(top, bottom, 1, 1), out=inner[:, here])
        if self.shortcut is None:
            out[:, here] = own
        else:
            self.shortcut(own, out=out[:, here])

    def _finish(self, inner: Tensor, out: Tensor, memory: FeatureMemory) -> Tensor:
        self.conv2(inner, norm=self.norm2.table(self.norm2.statistics(inner)), residual=out, out=out)
        memory.free(inner)
        return out


def bands_of(rows: int, band_rows: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of each band of `band_rows` rows; the last one may have fewer."""
    for begin in range(0, rows, band_rows):
        yield begin, min(begin + band_rows, rows)


def merged_statistics(parts: list[tuple[int, Tensor]]) -> Tensor:
    """Return the mean and variance [B, G, 2] of all parts, from each part's count and statistics."""
    counts = torch.tensor([count for count, _ in parts], dtype=torch.float64, device=parts[0][1].device)
    shares = (counts / counts.sum())[:, None, None]
    means, variances = torch.stack([statistics for _, statistics in parts]).double().unbind(-1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return torch.stack((mean, variance), dim=-1).float()


class KlAttentionBlock:
    """x + attention over all pixels of an image, with one head as wide as the channels."""

    def __init__(self, name: str, channels: int, num_groups: int) -> None:
        self.norm = GroupNorm(f"{name}.group_norm", channels, num_groups, EPS)
        self.qkv = Linear([(f"{name}.to_{part}", channels) for part in "qkv"], channels, bias=True)
        self.output = Linear([(f"{name}.to_out.0", channels)], channels, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        channels = x.shape[-1]
        x_ND = x.view(-1, channels)
        q, k, v = self.qkv(self.norm(x).view(-1, channels)).view(-1, 3, channels).split(1, dim=1)
        starts = torch.tensor([0, len(x_ND)], dtype=torch.int32, device=x.device)
        attended = varlen_attention(q, k, v, starts)
        self.output(attended.view(-1, channels), residual=x_ND, out=x_ND)
        return x


class KlMidBlock:
    def __init__(self, name: str, channels: int, num_groups: int, has_attention: bool) -> None:
        self.first = ResnetBlock(f"{name}.resnets.0", channels, channels, num_groups)
        self.attention = KlAttentionBlock(f"{name}.attentions.0", channels, num_groups) if has_attention else None
        self.second = ResnetBlock(f"{name}.resnets.1", channels, channels, num_groups)

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        x = self.first(x, memory)
        if self.attention is not None:
            x = self.attention(x)
        return self.second(x, memory)


def resnets_of(name: str, in_channels: int, out_channels: int, num_layers: int, num_groups: int) -> list[ResnetBlock]:
    """Return the blocks of a stage, all of one size; the first changes to the stage's channels."""
    return [
        ResnetBlock(f"{name}.resnets.{i}", out_channels if i else in_channels, out_channels, num_groups)
        for i in range(num_layers)
    ]


class KlDownStage:
    """Resnet blocks of one size, then a convolution to half the size, except in the last stage."""

    def __init__(self, resnets: list[ResnetBlock], step: Conv2d | None) -> None:
        self.resnets, self.step = resnets, step

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x, memory)
        if self.step is None:
            return x
        _, rows, columns, channels = x.shape
        out = self.step(x, out=memory.empty((1, rows // 2, columns // 2, channels), x.dtype))
        memory.free(x)
        return out


class KlUpStage:
    """A convolution to twice the size, except in the first stage, then resnet blocks."""

    def __init__(self, resnets: list[ResnetBlock], step: UpsampleConv2d | None) -> None:
        self.resnets, self.step = resnets, step

    def __call__(self, x: Tensor, memory: FeatureMemory, band_rows: int | None) -> Tensor:
        """Return the stage's result; with `band_rows` the larger image is computed in bands, never as a whole."""
        if self.step is None:
            x = self.resnets[0](x, memory)
        elif band_rows is not None:
            x = self.resnets[0].upsampled(x, self.step, band_rows, memory)
        else:
            _, rows, columns, _ = x.shape
            large = self.step(x, out=memory.empty((1, 2 * rows, 2 * columns, self.step.out_channels), x.dtype))
            memory.free(x)
            x = self.resnets[0](large, memory)
        for resnet in self.resnets[1:]:
            x = resnet(x, memory)
        return x


# Names of attention's parts in early checkpoints.
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
# Rows of the image in a band; two more rows on each side are computed again for each.
BAND_ROWS = 128


class KlEncoder:
    """Maps an image [1, H, W, 3] to mean and log variance of latents [1, h, w, 2 C]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        widths, groups = config.encoder_widths, config.num_groups
        self.conv_in = Conv2d("encoder.conv_in", config.in_channels, widths[0])
        self.stages = []
        for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            name = f"encoder.down_blocks.{i}"
            # Zeros only below and to the right: one more row and column, of which every other pixel is used.
            down = Conv2d(f"{name}.downsamplers.0.conv", width, width, stride=2, padding=(0, 1, 0, 1))
            is_last = i == len(widths) - 1
            resnets = resnets_of(name, before, width, config.layers_per_block, groups)
            self.stages.append(KlDownStage(resnets, None if is_last else down))
        self.mid = KlMidBlock("encoder.mid_block", widths[-1], groups, config.has_mid_attention)
        self.norm_out = GroupNorm("encoder.conv_norm_out", widths[-1], groups, EPS, activation="silu")
        self.conv_out = Conv2d("encoder.conv_out", widths[-1], 2 * config.latent_channels)

    def __call__(self, x: Tensor, memory: FeatureMemory) -> Tensor:
        x = self.conv_in(x, out=memory.empty((*x.shape[:-1], self.conv_in.out_channels), x.dtype))
        for stage in self.stages:
            x = stage(x, memory)
        x = self.mid(x, memory)
        result = self.conv_out(x, norm=self.norm_out.table(self.norm_out.statistics(x)))
        memory.free(x)
        return result


class KlDecoder:
    """Maps latents [1, h, w, C] to an image [1, H, W, 3]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        widths, groups = config.decoder_widths[::-1], config.num_groups
        self.conv_in = Conv2d("decoder.conv_in", config.latent_channels, widths[0])
        self.mid = KlMidBlock("decoder.mid_block", widths[0], groups, config.has_mid_attention)
        self.stages = []
        for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            # A checkpoint stores the step to a stage with the stage before it.
            step = UpsampleConv2d(f"decoder.up_blocks.{i - 1}.upsamplers.0.conv", before, before) if i else None
            resnets = resnets_of(f"decoder.up_blocks.{i}", before, width, config.layers_per_block + 1, groups)
            self.stages.append(KlUpStage(resnets, step))
        self.norm_out = GroupNorm("decoder.conv_norm_out", widths[-1], groups, EPS, activation="silu")
        self.conv_out = Conv2d("decoder.conv_out", widths[-1], config.out_channels)
        self.widths = widths

    def __call__(self, z: Tensor, memory: FeatureMemory, tile: int | None) -> Tensor:
        """Return the image; `tile`: rows of the image in a band; None for whole maps."""
        x = self.conv_in(z, out=memory.empty((*z.shape[:-1], self.conv_in.out_channels), z.dtype))
        x = self.mid(x, memory)
        for i, stage in enumerate(self.stages):
            x = stage(x, memory, None if tile is None else max(tile >> (len(self.stages) - 1 - i), 2))
        result = self.conv_out(x, norm=self.norm_out.table(self.norm_out.statistics(x)))
        memory.free(x)
        return result

    def map_channels(self) -> int:
        """Return the most channels of maps in memory at once, per pixel of the image."""
        steps = zip((self.widths[0], *self.widths), self.widths, strict=False)
        return max((before + 2 * width) >> 2 * (len(self.widths) - 1 - i) for i, (before, width) in enumerate(steps))


class AutoencoderKL:
    """A `models.vae.Vae` of images: frames of a clip are separate images."""

    temporal_factor = 1

    def __init__(self, config: AutoencoderConfig) -> None:
        self.config = config
        self.latent_channels = config.latent_channels * config.patch_size**2
        self.spatial_factor = 2**config.num_halvings * config.patch_size
        self.encoder = KlEncoder(config)
        self.decoder = KlDecoder(config)
        channels = config.latent_channels
        self.quant_conv = Conv2d("quant_conv", 2 * channels, 2 * channels, 1) if config.has_quant_conv else None
        self.post_quant_conv = Conv2d("post_quant_conv", channels, channels, 1) if config.has_post_quant_conv else None
        self.scale = config.scale or BatchStatistics(self.latent_channels, config.batch_norm_eps)

    def checkpoint_name(self, name: str) -> str | None:
        if name == "bn.num_batches_tracked":  # only for training
            return None
        *parts, part, kind = name.split(".")
        return ".".join((*parts, OLD_NAMES.get(part, part), kind)) if "attentions" in parts else name

    def encode(self, x_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Return latents [B, T, h, w, C] of images [B, T, H, W, 3] in [-1, 1]: the mode.

        `tile` is ignored: every map in memory is needed whole.
        """
        check_shape("the image to encode", x_BTHWC, self.config.in_channels)
        x = x_BTHWC.flatten(0, 1).to(self.encoder.conv_in.dtype).contiguous()
        memory = FeatureMemory()
        z = torch.cat([self.encoder(image, memory) for image in x.split(1)])
        if self.quant_conv is not None:
            z = self.quant_conv(z)
        z = patchify(z[..., : self.config.latent_channels], self.config.patch_size)
        return self.scale.normalize(z).to(x.dtype).unflatten(0, x_BTHWC.shape[:2])

    def decode(self, latents_BTHWC: Tensor, *, tile: int | None = None) -> Tensor:
        """Return images [B, T, H, W, 3] of latents [B, T, h, w, C], decoded one by one.

        `tile`: the largest maps are computed in bands of so many rows of the image; None: only if memory is short.
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
        images = torch.cat([self.decoder(item, memory, tile) for item in z.split(1)])
        return images.unflatten(0, latents_BTHWC.shape[:2])

    def _chosen_tile(self, z: Tensor) -> int | None:
        pixels = z.shape[1] * z.shape[2] * 4**self.config.num_halvings
        return BAND_ROWS if pixels * self.decoder.map_channels() * z.element_size() > memory_budget() else None


class BatchStatistics:
    """Mean and variance of each channel of patchified latents, measured in training."""

    def __init__(self, channels: int, eps: float) -> None:
        self.eps = eps
        self.mean = Unpacked("bn.running_mean", channels, in_fp32=True)
        self.variance = Unpacked("bn.running_var", channels, in_fp32=True)

    def normalize(self, z: Tensor) -> Tensor:
        return (z.float() - self.mean.value) / torch.sqrt(self.variance.value + self.eps)

    def restore(self, latents: Tensor) -> Tensor:
        return latents.float() * torch.sqrt(self.variance.value + self.eps) + self.mean.value


def patchify(z_BHWC: Tensor, side: int) -> Tensor:
    """Return squares as channels [B, H / side, W / side, C side^2], ordered by channel, row and column."""
    if side == 1:
        return z_BHWC
    squares = z_BHWC.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # B, H / side, side, W / side, side, C
    return squares.permute(0, 1, 3, 5, 2, 4).flatten(3)


def unpatchify(z_BHWC: Tensor, side: int) -> Tensor:
    """Invert `patchify`."""
    if side == 1:
        return z_BHWC
    squares = z_BHWC.unflatten(3, (-1, side, side))  # B, h, w, C, side, side
    return squares.permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2)


def build(config: Mapping[str, Any]) -> AutoencoderKL:
    """Return the network that a config describes, without weights."""
    return AutoencoderKL(AutoencoderConfig.from_dict(config))
