"""The transformer of FLUX.1: tokens of pictures and their texts in, velocities of the tokens out.

A token of a picture is a square of 2 x 2 latent pixels. B: pictures; N: rows of a text and its picture, text first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.rope import AxialRope
from tilewright.layers.step_cache import StepCache
from tilewright.layers.timestep_embedding import TimestepEmbedding
from tilewright.models.flux.blocks import (
    BlockConfig,
    DoubleBlock,
    Layout,
    SingleBlock,
    double_stream_names,
    join,
    layout_of,
    project_out,
)
from tilewright.models.flux.config import EPS, MLP_RATIO, FluxConfig
from tilewright.ops.activation import silu
from tilewright.ops.plan import scope

NUM_WAVES = 256
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class FluxText:
    """What the transformer reads of B prompts."""

    states: Tensor  # [B, tokens, text width]
    pooled: Tensor  # [B, pooled width]


class TextProjection:
    """linear_2(silu(linear_1(pooled))), in fp32."""

    def __init__(self, name: str, in_width: int, width: int) -> None:
        inner = partition.current().width("pooled text", width)
        self.linear_1 = Linear([(f"{name}.linear_1", width, inner)], in_width, bias=True)
        self.linear_2 = Linear([(f"{name}.linear_2", width)], width, column_shard=inner, bias=True)

    def __call__(self, pooled: Tensor) -> Tensor:
        return self.linear_2(self.linear_1(pooled.float(), activation="silu"))


class ModulatedBlock:
    """A block with its own linears from the conditioning to shifts, scales and gates, one per stream."""

    def __init__(self, block: DoubleBlock | SingleBlock, modulations: list[str], num_parts: int, width: int) -> None:
        self.block = block
        self.num_parts = num_parts
        self.modulations = [
            GatheredLinear.named(name, num_parts * width, width, what="modulation", bias=True) for name in modulations
        ]

    def __call__(self, x_BND: Tensor, layout: Layout, conditioning: Tensor) -> None:
        found = [linear(conditioning).chunk(self.num_parts, dim=1) for linear in self.modulations]
        if isinstance(self.block, DoubleBlock):
            self.block(x_BND, layout, (found[0], found[1]))
        else:
            self.block(x_BND, layout, found[0])


def _double_block(name: str, config: BlockConfig) -> ModulatedBlock:
    text = double_stream_names(name, is_text=True, mlp=("net.0.proj", "net.2"))
    picture = double_stream_names(name, is_text=False, mlp=("net.0.proj", "net.2"))
    modulations = [f"{name}.norm1_context.linear", f"{name}.norm1.linear"]
    return ModulatedBlock(DoubleBlock(text, picture, config), modulations, 6, config.width)


def _single_block(name: str, config: BlockConfig) -> ModulatedBlock:
    block = SingleBlock(name, config, f"{name}.attn.norm_q", f"{name}.attn.norm_k", f"{name}.proj_out")
    return ModulatedBlock(block, [f"{name}.norm.linear"], 3, config.width)


class FluxTransformer:
    def __init__(self, config: FluxConfig) -> None:
        self.config = config
        width = config.width
        block = BlockConfig(
            config.num_heads,
            config.head_width,
            mlp_width=MLP_RATIO * width,
            eps=EPS,
            bias=True,
            activation="gelu_tanh",
            gated=False,
        )
        self.picture_in = GatheredLinear.named("x_embedder", width, config.in_channels, what="tokens", bias=True)
        self.text_in = GatheredLinear.named("context_embedder", width, config.text_width, what="text", bias=True)
        embedder = "time_text_embed"
        self.time = TimestepEmbedding(f"{embedder}.timestep_embedder", NUM_WAVES, width)
        self.guidance = (
            TimestepEmbedding(f"{embedder}.guidance_embedder", NUM_WAVES, width) if config.is_told_guidance else None
        )
        self.pooled = TextProjection(f"{embedder}.text_embedder", config.pooled_width, width)
        self.blocks = [
            *(_double_block(f"transformer_blocks.{i}", block) for i in range(config.num_double_blocks)),
            *(_single_block(f"single_transformer_blocks.{i}", block) for i in range(config.num_single_blocks)),
        ]
        self.modulation = GatheredLinear.named("norm_out.linear", 2 * width, width, what="modulation", bias=True)
        self.output = GatheredLinear.named("proj_out", config.out_channels, width, what="tokens", bias=True)
        self.rope = AxialRope(config.rope_widths, ROPE_THETA)

    @staticmethod
    def checkpoint_name(name: str) -> str | None:
        return name

    @property
    def dtype(self) -> torch.dtype:
        return self.picture_in.packed.dtype

    def layout(self, num_text: int, positions: Tensor, batch_size: int) -> Layout:
        """Of B pictures whose tokens lie at `positions` int64 [3, tokens]: picture number, row, column.

        Texts have no positions.
        """
        return layout_of(self.rope, torch.zeros(3, num_text, dtype=torch.int64), positions, batch_size)

    def __call__(
        self,
        tokens: Tensor,
        timestep: float,
        text: FluxText,
        layout: Layout,
        guidance: float | None = None,
        cache: StepCache | None = None,
    ) -> Tensor:
        """The velocity [B, tokens, out channels], fp32, of tokens [B, tokens, in channels].

        The timestep is in thousandths of the whole way; `guidance` is for checkpoints that are told it, and only those.
        """
        assert (guidance is not None) == self.config.is_told_guidance
        x_BND = join(self.text_in, text.states, self.picture_in, tokens, self.dtype)
        conditioning = silu(self._conditioning(timestep, text.pooled, guidance))

        def run(blocks: Sequence[ModulatedBlock]) -> None:
            for block in blocks:
                with scope():
                    block(x_BND, layout, conditioning)

        cache = cache or StepCache(0.0)
        cache.run(x_BND, lambda: run(self.blocks[:1]), lambda: run(self.blocks[1:]))
        return project_out(x_BND[:, layout.num_text :], self.modulation(conditioning), EPS, self.output)

    def _conditioning(self, timestep: float, pooled: Tensor, guidance: float | None) -> Tensor:
        """[B, D], fp32."""
        device = pooled.device
        result = self.time(torch.tensor([timestep], device=device)) + self.pooled(pooled)
        if self.guidance is not None and guidance is not None:
            result = result + self.guidance(torch.tensor([guidance * 1000], device=device))
        return result


def build(config: Mapping[str, Any]) -> FluxTransformer:
    return FluxTransformer(FluxConfig.from_dict(config))
