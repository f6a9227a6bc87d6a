"""What a FluxTransformer2DModel config describes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.models.text_config import Config, integer
from tilewright.types import UnsupportedConfig

MLP_RATIO = 4
EPS = 1e-6


@dataclass(frozen=True)
class FluxConfig:
    num_heads: int
    head_width: int
    num_double_blocks: int
    num_single_blocks: int
    in_channels: int  # of a token: a square of 2 x 2 latent pixels
    out_channels: int
    text_width: int  # of a token of the long text (T5)
    pooled_width: int  # of the whole text (CLIP)
    is_told_guidance: bool  # as the timestep: FLUX.1 dev
    rope_widths: tuple[int, ...]  # how much of a head follows each axis: picture, row and column

    @classmethod
    def from_dict(cls, config: Config) -> FluxConfig:
        if (patch_size := integer(config, "patch_size", 1)) != 1:
            raise UnsupportedConfig(f"config has patch_size {patch_size}, expected 1")
        head_width, in_channels = integer(config, "attention_head_dim", 128), integer(config, "in_channels", 64)
        return cls(
            num_heads=integer(config, "num_attention_heads", 24),
            head_width=head_width,
            num_double_blocks=integer(config, "num_layers", 19),
            num_single_blocks=integer(config, "num_single_layers", 38),
            in_channels=in_channels,
            out_channels=integer(config, "out_channels", in_channels),
            text_width=integer(config, "joint_attention_dim", 4096),
            pooled_width=integer(config, "pooled_projection_dim", 768),
            is_told_guidance=bool(config.get("guidance_embeds", False)),
            rope_widths=rope_widths(config, head_width, (16, 56, 56)),
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width


def rope_widths(config: Config, head_width: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """config's axes_dims_rope: even numbers, as many as by default, that share out a head."""
    widths = config.get("axes_dims_rope", default)
    if (
        not isinstance(widths, (list, tuple))
        or len(widths) != len(default)
        or not all(type(width) is int and width > 0 and width % 2 == 0 for width in widths)
        or sum(widths) != head_width
    ):
        raise UnsupportedConfig(
            f"config has axes_dims_rope {widths!r}, expected {len(default)} even numbers that add up to "
            f"attention_head_dim, {head_width}"
        )
    return tuple(widths)
