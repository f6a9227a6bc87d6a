"""What a QwenImageTransformer2DModel config describes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.models.text_config import Config, integer
from tilewright.types import UnsupportedConfig

# What other versions of the model have: a layered one, and one that is told its guidance.
NOT_BUILT = ("use_additional_t_cond", "use_layer3d_rope", "guidance_embeds")


@dataclass(frozen=True)
class QwenImageConfig:
    num_heads: int
    head_width: int
    num_layers: int
    in_channels: int  # of a patch
    out_channels: int  # of a latent pixel
    patch_size: int
    text_width: int
    rope_widths: tuple[int, int, int]  # how much of a head follows the frame, the row and the column
    has_still_references: bool  # pictures to edit stand at timestep 0, not at that of the one that is made

    @classmethod
    def from_dict(cls, config: Config) -> QwenImageConfig:
        for key in NOT_BUILT:
            if config.get(key):
                raise UnsupportedConfig(f"config has {key} {config[key]!r}, expected false: it is not built")
        head_width = integer(config, "attention_head_dim", 128)
        in_channels = integer(config, "in_channels", 64)
        return cls(
            num_heads=integer(config, "num_attention_heads", 24),
            head_width=head_width,
            num_layers=integer(config, "num_layers", 60),
            in_channels=in_channels,
            out_channels=integer(config, "out_channels", 16) if config.get("out_channels", 16) else in_channels,
            patch_size=integer(config, "patch_size", 2),
            text_width=integer(config, "joint_attention_dim", 3584),
            rope_widths=_rope_widths(config, head_width),
            has_still_references=bool(config.get("zero_cond_t")),
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width

    @property
    def patch_width(self) -> int:
        """Values that the transformer gives for each patch."""
        return self.out_channels * self.patch_size**2


def _rope_widths(config: Config, head_width: int) -> tuple[int, int, int]:
    match config.get("axes_dims_rope", (16, 56, 56)):
        case [int(t), int(h), int(w)] if t + h + w == head_width and not (t | h | w) % 2:
            return t, h, w
        case given:
            raise UnsupportedConfig(
                f"config has axes_dims_rope {given!r}, expected three even numbers that add up to attention_head_dim, "
                f"{head_width}"
            )
