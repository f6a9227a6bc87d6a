"""What a WanTransformer3DModel config describes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.models.text_config import Config, integer, number
from tilewright.types import UnsupportedConfig


@dataclass(frozen=True)
class WanConfig:
    num_heads: int
    head_width: int
    mlp_width: int
    num_layers: int
    in_channels: int
    out_channels: int
    text_width: int
    num_waves: int  # of the timestep embedding
    patch_size: tuple[int, int, int]  # frames, rows, columns
    eps: float
    max_positions: int  # of each axis

    @classmethod
    def from_dict(cls, config: Config) -> WanConfig:
        _refuse_what_is_not_built(config)
        head_width = integer(config, "attention_head_dim", 128)
        if head_width % 2 or head_width < 6:
            raise UnsupportedConfig(
                f"config has attention_head_dim {head_width}, expected an even number from 6: rope has three axes"
            )
        in_channels = integer(config, "in_channels", 16)
        return cls(
            num_heads=integer(config, "num_attention_heads", 40),
            head_width=head_width,
            mlp_width=integer(config, "ffn_dim", 13824),
            num_layers=integer(config, "num_layers", 40),
            in_channels=in_channels,
            out_channels=in_channels if config.get("out_channels") is None else integer(config, "out_channels", 16),
            text_width=integer(config, "text_dim", 4096),
            num_waves=integer(config, "freq_dim", 256),
            patch_size=_patch_size(config),
            eps=number(config, "eps", 1e-6),
            max_positions=integer(config, "rope_max_seq_len", 1024),
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width

    @property
    def patch_width(self) -> int:
        """Values that the transformer gives for each patch."""
        return self.out_channels * math.prod(self.patch_size)

    @property
    def rope_widths(self) -> tuple[int, int, int]:
        """How much of a head follows the frame, the row and the column."""
        spatial = 2 * (self.head_width // 6)
        return self.head_width - 2 * spatial, spatial, spatial


def _patch_size(config: Config) -> tuple[int, int, int]:
    match config.get("patch_size", (1, 2, 2)):
        case [int(frames), int(rows), int(columns)]:
            return frames, rows, columns
        case given:
            raise UnsupportedConfig(f"config has patch_size {given!r}, expected three whole numbers")


def _refuse_what_is_not_built(config: Config) -> None:
    for key in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
        if config.get(key) is not None:
            raise UnsupportedConfig(
                f"config has {key} {config[key]!r}, expected null: a Wan transformer that reads a picture through CLIP "
                "(Wan 2.1 image-to-video) is not built; Wan 2.2 TI2V animates pictures"
            )
    for key, built in (("qk_norm", "rms_norm_across_heads"), ("cross_attn_norm", True)):
        if config.get(key, built) != built:
            raise UnsupportedConfig(f"config has {key} {config[key]!r}, expected {built!r}")
