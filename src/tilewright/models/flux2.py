"""FLUX.2 klein: its config and its transformer: latent pixels of images and their texts in, velocities out.

Like FLUX.1's, with one modulation for all blocks of a kind, gated MLPs, no biases, and texts that have positions. B:
images; N: rows of a text and its image, text first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.embedding import TimestepEmbedding
from tilewright.layers.linear import GatheredLinear
from tilewright.layers.memory import StepCache
from tilewright.layers.rope import AxialRope
from tilewright.models.flux import (
    BlockConfig,
    DoubleBlock,
    Layout,
    SingleBlock,
    double_stream_names,
    join,
    layout_of,
    project_out,
    rope_widths,
)
from tilewright.models.text_config import Config, integer, number
from tilewright.ops.activation import silu
from tilewright.ops.plan import scope
from tilewright.types import UnsupportedConfig


@dataclass(frozen=True)
class Flux2Config:
    num_heads: int
    head_width: int
    mlp_width: int
    num_double_blocks: int
    num_single_blocks: int
    in_channels: int  # of a token, which is a latent pixel
    out_channels: int
    text_width: int
    num_waves: int  # of the timestep
    eps: float
    rope_theta: float
    rope_widths: tuple[int, ...]  # elements of a head rotated by each axis: image, row, column, and index in the text

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


class Flux2Transformer:
    def __init__(self, config: Flux2Config) -> None:
        self.config = config
        width = config.width
        block = BlockConfig(
            config.num_heads,
            config.head_width,
            config.mlp_width,
            config.eps,
            bias=False,
            activation="silu",
            gated=True,
        )
        self.image_in = GatheredLinear.named("x_embedder", width, config.in_channels, what="tokens")
        self.text_in = GatheredLinear.named("context_embedder", width, config.text_width, what="text")
        self.time = TimestepEmbedding("time_guidance_embed.timestep_embedder", config.num_waves, width, bias=False)
        self.text_modulation = _modulation("double_stream_modulation_txt.linear", 6, width)
        self.image_modulation = _modulation("double_stream_modulation_img.linear", 6, width)
        self.single_modulation = _modulation("single_stream_modulation.linear", 3, width)
        self.double_blocks = [_double_block(f"transformer_blocks.{i}", block) for i in range(config.num_double_blocks)]
        self.single_blocks = [
            _single_block(f"single_transformer_blocks.{i}.attn", block) for i in range(config.num_single_blocks)
        ]
        self.modulation = _modulation("norm_out.linear", 2, width)
        self.output = GatheredLinear.named("proj_out", config.out_channels, width, what="tokens")
        self.rope = AxialRope(config.rope_widths, config.rope_theta)

    @staticmethod
    def checkpoint_name(name: str) -> str | None:
        return name

    @property
    def dtype(self) -> torch.dtype:
        return self.image_in.packed.dtype

    def layout(self, num_text: int, positions: Tensor, batch_size: int) -> Layout:
        """Return the layout of B images with tokens at `positions` int64 [3, tokens]: image number, row, column.

        The fourth axis is the index in the text, 0 for images.
        """
        text = torch.zeros(4, num_text, dtype=torch.int64)
        text[3] = torch.arange(num_text)
        image = torch.cat([positions, torch.zeros_like(positions[:1])])
        return layout_of(self.rope, text, image, batch_size)

    def __call__(
        self, tokens: Tensor, timestep: float, text: Tensor, layout: Layout, cache: StepCache | None = None
    ) -> Tensor:
        """Return the velocity [B, tokens, out channels], fp32, of tokens [B, tokens, in channels].

        `text` is [B, tokens of text, text width]; the timestep is in thousandths of the whole way.
        """
        batch_size = len(tokens)
        x_BND = join(self.text_in, text, self.image_in, tokens, self.dtype)
        conditioning = silu(self.time(torch.tensor([timestep], device=x_BND.device)))

        def parts(modulation: GatheredLinear, count: int) -> list[Tensor]:
            return list(modulation(conditioning).expand(batch_size, -1).contiguous().chunk(count, dim=1))

        of_streams = parts(self.text_modulation, 6), parts(self.image_modulation, 6)
        of_both = parts(self.single_modulation, 3)

        def run(double_blocks: Sequence[DoubleBlock], single_blocks: Sequence[SingleBlock]) -> None:
            for double_block in double_blocks:
                with scope():
                    double_block(x_BND, layout, of_streams)
            for single_block in single_blocks:
                with scope():
                    single_block(x_BND, layout, of_both)

        cache = cache or StepCache(0.0)
        cache.run(
            x_BND,
            lambda: run(self.double_blocks[:1], ()),
            lambda: run(self.double_blocks[1:], self.single_blocks),
        )
        last = self.modulation(conditioning).expand(batch_size, -1)
        return project_out(x_BND[:, layout.num_text :], last, self.config.eps, self.output)


def _modulation(name: str, num_parts: int, width: int) -> GatheredLinear:
    return GatheredLinear.named(name, num_parts * width, width, what="modulation")


def _double_block(name: str, config: BlockConfig) -> DoubleBlock:
    mlp = ("linear_in", "linear_out")
    text = double_stream_names(name, is_text=True, mlp=mlp)
    return DoubleBlock(text, double_stream_names(name, is_text=False, mlp=mlp), config)


def _single_block(name: str, config: BlockConfig) -> SingleBlock:
    fused = f"{name}.to_qkv_mlp_proj"
    return SingleBlock(name, config, f"{name}.norm_q", f"{name}.norm_k", f"{name}.to_out", fused_input=fused)


def build(config: Mapping[str, Any]) -> Flux2Transformer:
    return Flux2Transformer(Flux2Config.from_dict(config))
