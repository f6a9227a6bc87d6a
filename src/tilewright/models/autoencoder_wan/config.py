"""The config of AutoencoderKLWan (2.1 and 2.2) and AutoencoderKLQwenImage, with diffusers' defaults."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.models.text_config import Config, integer
from tilewright.models.vae import LatentScale
from tilewright.types import UnsupportedConfig

# Of Wan 2.1, which both classes have for defaults.
MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@dataclass(frozen=True)
class WanConfig:
    in_channels: int  # of the network: a picture's times the patch's pixels
    out_channels: int
    latent_channels: int
    encoder_width: int
    decoder_width: int
    multipliers: tuple[int, ...]  # of the width in each stage, from the picture to the latents
    num_resnets: int  # of a stage of the encoder; the decoder has one more
    halves_time: tuple[bool, ...]  # of each step from a stage to the next, beside rows and columns
    has_shortcuts: bool  # around whole stages, as Wan 2.2 has them
    patch_size: int
    scale: LatentScale

    @classmethod
    def from_dict(cls, config: Config) -> WanConfig:
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
        picture_channels = integer(config, "input_channels", 3)  # Qwen-Image's name, of what goes in and comes out
        return cls(
            in_channels=integer(config, "in_channels", picture_channels),
            out_channels=integer(config, "out_channels", picture_channels),
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
