"""Z-Image's config: what transformer/config.json says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.models.text_config import integer, number
from tilewright.types import UnsupportedConfig

CLASS_NAME = "ZImageTransformer2DModel"
CONDITION_WIDTH = 256  # of the timestep's embedding, or the model's width where that is less


@dataclass(frozen=True)
class ZImageConfig:
    width: int
    num_heads: int
    num_layers: int
    num_refiner_layers: int
    channels: int  # of latents
    patch_size: int
    caption_width: int
    eps: float
    qk_norm: bool
    rope_theta: float
    rope_widths: tuple[int, int, int]  # elements of a head that follow the frame, the row and the column
    rope_lengths: tuple[int, int, int]  # positions that each axis has
    time_scale: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ZImageConfig:
        width, num_heads = integer(config, "dim", 3840), integer(config, "n_heads", 30)
        if num_heads < 1 or width % num_heads:
            raise UnsupportedConfig(f"config has n_heads {num_heads}, expected a divisor of dim, {width}")
        if integer(config, "n_kv_heads", 30) != num_heads:
            raise UnsupportedConfig(f"config has n_kv_heads {config.get('n_kv_heads')}, expected n_heads, {num_heads}")
        if config.get("siglip_feat_dim") is not None:
            raise UnsupportedConfig("config has siglip_feat_dim: Z-Image-Omni, which reads pictures, is not built")
        if list(config.get("all_f_patch_size", (1,))) != [1] or len(config.get("all_patch_size", (2,))) != 1:
            raise UnsupportedConfig(
                f"config has all_patch_size {config.get('all_patch_size')} and all_f_patch_size "
                f"{config.get('all_f_patch_size')}, expected one size, and 1 frame"
            )
        rope_widths = _triple(config, "axes_dims", (32, 48, 48))
        if sum(rope_widths) != width // num_heads or any(axis % 2 for axis in rope_widths):
            raise UnsupportedConfig(
                f"config has axes_dims {list(rope_widths)}, expected even ones with the sum of a head, "
                f"{width // num_heads}"
            )
        return cls(
            width=width,
            num_heads=num_heads,
            num_layers=integer(config, "n_layers", 30),
            num_refiner_layers=integer(config, "n_refiner_layers", 2),
            channels=integer(config, "in_channels", 16),
            patch_size=int(config.get("all_patch_size", (2,))[0]),
            caption_width=integer(config, "cap_feat_dim", 2560),
            eps=number(config, "norm_eps", 1e-5),
            qk_norm=bool(config.get("qk_norm", True)),
            rope_theta=number(config, "rope_theta", 256.0),
            rope_widths=rope_widths,
            rope_lengths=_triple(config, "axes_lens", (1024, 512, 512)),
            time_scale=number(config, "t_scale", 1000.0),
        )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def mlp_width(self) -> int:
        return int(self.width / 3 * 8)

    @property
    def condition_width(self) -> int:
        return min(self.width, CONDITION_WIDTH)

    @property
    def patch_width(self) -> int:
        """Numbers in a patch of latents."""
        return self.patch_size**2 * self.channels


def _triple(config: Mapping[str, Any], key: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
    values = config.get(key, default)
    if not isinstance(values, (list, tuple)) or len(values) != 3 or not all(type(value) is int for value in values):
        raise UnsupportedConfig(f"config has {key} {values!r}, expected three whole numbers")
    return values[0], values[1], values[2]
