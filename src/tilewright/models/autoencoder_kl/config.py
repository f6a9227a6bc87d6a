"""The config of AutoencoderKL and AutoencoderKLFlux2, with diffusers' defaults for what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.models.text_config import Config, integer, number
from tilewright.models.vae import LatentScale
from tilewright.types import UnsupportedConfig


@dataclass(frozen=True)
class AutoencoderConfig:
    in_channels: int
    out_channels: int
    latent_channels: int
    encoder_widths: tuple[int, ...]  # channels of each block, from the picture to the latents
    decoder_widths: tuple[int, ...]  # in the same order
    layers_per_block: int
    num_groups: int
    has_quant_conv: bool
    has_post_quant_conv: bool
    has_mid_attention: bool
    scale: LatentScale | None  # None: statistics in the checkpoint, as FLUX.2 has them
    batch_norm_eps: float  # of those statistics
    patch_size: int  # side of the square of latents that the transformer sees as one

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
        """Of rows and columns, from the picture to the latents."""
        return len(self.encoder_widths) - 1


def _integers(config: Config, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = config.get(key, default)
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, int) for item in value):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected whole numbers")
    return tuple(value)


def _check_blocks(config: Config, key: str, expected: str, count: int) -> None:
    """UnsupportedConfig unless config[key] names `expected` `count` times."""
    blocks = config.get(key, (expected,) * count)
    assert isinstance(blocks, Sequence)
    for block in blocks:
        if block != expected:
            raise UnsupportedConfig(f"config has {block!r} in {key}, expected {expected}")
    if len(blocks) != count:
        raise UnsupportedConfig(f"config has {len(blocks)} {key}, expected {count}, as many as block_out_channels")


def _scale(config: Config, channels: int) -> LatentScale:
    """latents = (z - shift) * factor; where per-channel statistics are given, those of z / factor."""
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
