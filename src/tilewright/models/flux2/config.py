"""What a Flux2Transformer2DModel config describes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.models.flux.config import rope_widths
from tilewright.models.text_config import Config, integer, number
from tilewright.types import UnsupportedConfig


@dataclass(frozen=True)
class Flux2Config:
    num_heads: int
    head_width: int
    mlp_width: int
    num_double_blocks: int
    num_single_blocks: int
    in_channels: int  # of a token, which is a pixel of the latents
    out_channels: int
    text_width: int
    num_waves: int  # of the timestep
    eps: float
    rope_theta: float
    rope_widths: tuple[int, ...]  # how much of a head follows each axis: picture, row, column, and place in the text

    @classmethod
    def from_dict(cls, config: Config) -> Flux2Config:
        if (patch_size := integer(config, "patch_size", 1)) != 1:
            raise UnsupportedConfig(f"config has patch_size {patch_size}, expected 1")
        if config.get("guidance_embeds", True):
            raise UnsupportedConfig("config has guidance_embeds true, expected false: klein is built, not FLUX.2 dev")
        num_heads, head_width = integer(config, "num_attention_heads", 48), integer(config, "attention_head_dim", 128)
        in_channels = integer(config, "in_channels", 128)
        return cls(
            num_heads=num_heads,
            head_width=head_width,
            mlp_width=int(num_heads * head_width * number(config, "mlp_ratio", 3.0)),
            num_double_blocks=integer(config, "num_layers", 8),
            num_single_blocks=integer(config, "num_single_layers", 48),
            in_channels=in_channels,
            out_channels=integer(config, "out_channels", in_channels),
            text_width=integer(config, "joint_attention_dim", 15360),
            num_waves=integer(config, "timestep_guidance_channels", 256),
            eps=number(config, "eps", 1e-6),
            rope_theta=number(config, "rope_theta", 2000),
            rope_widths=rope_widths(config, head_width, (32, 32, 32, 32)),
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width
