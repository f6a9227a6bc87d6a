"""FLUX.1: its config, the blocks it shares with FLUX.2, and its transformer: tokens in, velocities out.

x_BND: N rows of each of B images, its text's rows first. A token of an image is a square of 2 x 2 latent pixels. A
double-stream block has separate weights for text and image, a single-stream block the same for all rows, with
attention and MLP side by side.

A stream's rows of one image are contiguous, so products write queries, keys and values where joint attention reads
them: nothing is copied. Several images need several products, of hundreds of rows each, so reading the weights again
costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.embedding import TimestepEmbedding
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.memory import StepCache
from tilewright.layers.rope import AxialRope
from tilewright.models.text_config import Config, integer
from tilewright.ops import backend
from tilewright.ops.activation import silu
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import qk_norm_rope
from tilewright.ops.norm import ada_layer_norm, gated_add
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig
from tilewright.weights.conv import Unpacked
from tilewright.weights.spec import Shard

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
    text_width: int  # per token of the long text (T5)
    pooled_width: int  # of the whole text (CLIP)
    is_told_guidance: bool  # guidance is an input like the timestep, as in FLUX.1 dev
    rope_widths: tuple[int, ...]  # elements of a head rotated by each axis: image, row and column

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
    """Return config's axes_dims_rope: as many even numbers as in `default`, which add up to the head's width."""
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


@dataclass(frozen=True)
class BlockConfig:
    num_heads: int
    head_width: int
    mlp_width: int
    eps: float
    bias: bool
    activation: str  # of the MLP
    gated: bool  # the MLP multiplies the activation by a second product

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width


# Shift, scale and gate, each [B, D]: a norm is multiplied by 1 + scale and shifted, the addend multiplied by gate.
Modulation = Sequence[Tensor]


@dataclass(frozen=True)
class Layout:
    """Row layout of a batch: the text's length, the bounds of images in the packed rows, and every row's rope."""

    num_text: int
    starts: Tensor  # int32 [B + 1]
    cos: Tensor  # [B * N, R / 2]
    sin: Tensor

    @property
    def num_rows(self) -> int:
        """Rows of one image and its text."""
        return len(self.cos) // (len(self.starts) - 1)

    @property
    def streams(self) -> tuple[slice, slice]:
        """Rows of text and of image."""
        return slice(0, self.num_text), slice(self.num_text, self.num_rows)


def layout_of(rope: AxialRope, text: Tensor, image: Tensor, batch_size: int) -> Layout:
    """Return the layout of text and image positions int64 [axes, tokens], the same for the whole batch."""
    positions = torch.cat([text, image], dim=1)
    cos, sin = rope.tables(positions)
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=backend.device()) * positions.shape[1]
    return Layout(text.shape[1], starts, cos.repeat(batch_size, 1), sin.repeat(batch_size, 1))


def grid_positions(image: int, rows: int, columns: int) -> Tensor:
    """Return image number, row and column of each token of a grid, row by row: int64 [3, rows * columns]."""
    axes = torch.meshgrid(torch.tensor([image]), torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])


@dataclass(frozen=True)
class StreamNames:
    """Names of a stream's weights in a checkpoint."""

    qkv: tuple[str, str, str]
    q_norm: str
    k_norm: str
    output: str
    mlp_in: str
    mlp_out: str


def double_stream_names(name: str, *, is_text: bool, mlp: tuple[str, str]) -> StreamNames:
    """Return the names of a stream of the double-stream block `name`; `mlp` names the family's MLP linears."""
    attention, feed_forward = f"{name}.attn", f"{name}.ff_context" if is_text else f"{name}.ff"
    q, k, v = (f"{attention}.add_{part}_proj" if is_text else f"{attention}.to_{part}" for part in "qkv")
    norm = "norm_added" if is_text else "norm"
    return StreamNames(
        qkv=(q, k, v),
        q_norm=f"{attention}.{norm}_q",
        k_norm=f"{attention}.{norm}_k",
        output=f"{attention}.to_add_out" if is_text else f"{attention}.to_out.0",
        mlp_in=f"{feed_forward}.{mlp[0]}",
        mlp_out=f"{feed_forward}.{mlp[1]}",
    )


class FluxStream:
    """Weights of the text or the image in a double-stream block."""

    def __init__(self, names: StreamNames, config: BlockConfig) -> None:
        self.config = config
        own, width = partition.current(), config.width
        heads = own.heads("attention", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        self.qkv = Linear([(name, width, rows) for name in names.qkv], width, bias=config.bias)
        self.q_norm = Unpacked(f"{names.q_norm}.weight", config.head_width)
        self.k_norm = Unpacked(f"{names.k_norm}.weight", config.head_width)
        self.output = Linear([(names.output, width)], width, column_shard=rows, bias=config.bias)
        inner = own.width("MLP width", config.mlp_width)
        self.mlp_in = mlp_in(names.mlp_in, config, inner)
        self.mlp_out = Linear([(names.mlp_out, width)], config.mlp_width, column_shard=inner, bias=config.bias)

    def attend(self, x_1ND: Tensor, modulation: Modulation, qkv_NC: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Write queries, keys and values, normed and rotated, to qkv_NC."""
        config, (shift, scale, _) = self.config, modulation
        self.qkv(ada_layer_norm(x_1ND, scale, shift, config.eps)[0], out=qkv_NC)
        q, k, _ = qkv_NC.view(len(qkv_NC), 3 * self.num_heads, -1).split(self.num_heads, dim=1)
        qk_norm_rope(q, k, self.q_norm.value, self.k_norm.value, config.eps, cos, sin, interleaved=True)

    def update(self, x_1ND: Tensor, attended_NC: Tensor, modulation: Modulation) -> None:
        """Compute x + gate * output, then x + gate * mlp(norm(x)).

        The modulation is the attention's, then the MLP's.
        """
        config = self.config
        _, _, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        projected = self.output(attended_NC)[None]
        normed = ada_layer_norm(projected, mlp_scale, mlp_shift, config.eps, residual=x_1ND, gate=gate)
        inner = self.mlp_in(normed, activation=config.activation)
        gated_add(x_1ND, self.mlp_out(inner), mlp_gate, out=x_1ND)


def mlp_in(name: str, config: BlockConfig, inner: Shard, *, first_row: int = 0, num_rows: int | None = None) -> Linear:
    """Return the MLP's first product, this rank's `inner` entries of it. Gate and up are one tensor, in this order.

    It may be part of a larger tensor of `num_rows`, from `first_row` on.
    """
    width = config.mlp_width
    count = 2 if config.gated else 1
    total = count * width if num_rows is None else num_rows
    parts = [(name, total, inner.after(first_row + part * width)) for part in range(count)]
    return Linear(parts, config.width, bias=config.bias, gated=config.gated)


class DoubleBlock:
    """Joint attention, then MLPs, with separate weights for text and image, updating x."""

    def __init__(self, text: StreamNames, image: StreamNames, config: BlockConfig) -> None:
        self.config = config
        self.streams = FluxStream(text, config), FluxStream(image, config)

    def __call__(self, x_BND: Tensor, layout: Layout, modulations: tuple[Modulation, Modulation]) -> None:
        """Update x; the modulations of text and of image have six parts each: attention's, then the MLP's."""
        batch_size, num_rows, _ = x_BND.shape
        heads, width = self.streams[0].num_heads, self.config.head_width
        qkv = empty((batch_size, num_rows, 3 * heads * width), x_BND.dtype)
        # Of each image's text and image: stream, rows of x, modulation.
        parts = [
            (b, rows, stream, [item[b : b + 1] for item in modulation])
            for b in range(batch_size)
            for rows, stream, modulation in zip(layout.streams, self.streams, modulations, strict=True)
        ]
        for b, rows, stream, modulation in parts:
            turned = slice(b * num_rows + rows.start, b * num_rows + rows.stop)
            x_1ND = x_BND[b : b + 1, rows]
            stream.attend(x_1ND, modulation[:3], qkv[b, rows], layout.cos[turned], layout.sin[turned])
        q, k, v = qkv.view(batch_size * num_rows, 3 * heads, width).split(heads, dim=1)
        attended = varlen_attention(q, k, v, layout.starts).view(batch_size, num_rows, -1)
        for b, rows, stream, modulation in parts:
            stream.update(x_BND[b : b + 1, rows], attended[b, rows], modulation)


class SingleBlock:
    """x + gate * output(attention(h), mlp(h)) of h = norm(x), updating x."""

    def __init__(
        self, name: str, config: BlockConfig, q_norm: str, k_norm: str, output: str, *, fused_input: str | None = None
    ) -> None:
        """Make the block; `fused_input` names a tensor with q, k, v and the MLP's first product, if they are fused."""
        self.config = config
        own, width = partition.current(), config.width
        heads = own.heads("attention", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows, inner = heads.queries.times(config.head_width), own.width("MLP width", config.mlp_width)
        if fused_input is None:
            qkv = [(f"{name}.attn.to_{part}", width, rows) for part in "qkv"]
            self.mlp_in = mlp_in(f"{name}.proj_mlp", config, inner)
        else:
            total = 3 * width + (2 if config.gated else 1) * config.mlp_width
            qkv = [(fused_input, total, rows.after(part * width)) for part in range(3)]
            self.mlp_in = mlp_in(fused_input, config, inner, first_row=3 * width, num_rows=total)
        self.qkv = Linear(qkv, width, bias=config.bias)
        self.q_norm = Unpacked(f"{q_norm}.weight", config.head_width)
        self.k_norm = Unpacked(f"{k_norm}.weight", config.head_width)
        self.output = Linear(
            [(output, width)],
            width + config.mlp_width,
            column_shard=rows + inner.after(width),
            bias=config.bias,
        )
        self.inner_width = inner.length

    def __call__(self, x_BND: Tensor, layout: Layout, modulation: Modulation) -> None:
        config, heads = self.config, self.num_heads
        shift, scale, gate = modulation
        h_TD = ada_layer_norm(x_BND, scale, shift, config.eps).flatten(0, 1)
        q, k, v = self.qkv(h_TD).view(len(h_TD), 3 * heads, -1).split(heads, dim=1)
        qk_norm_rope(q, k, self.q_norm.value, self.k_norm.value, config.eps, layout.cos, layout.sin, interleaved=True)
        attended_width = heads * config.head_width
        both = empty((len(h_TD), attended_width + self.inner_width), x_BND.dtype)
        varlen_attention(q, k, v, layout.starts, out=both[:, :attended_width].unflatten(1, (heads, -1)))
        self.mlp_in(h_TD, activation=config.activation, out=both[:, attended_width:])
        gated_add(x_BND, self.output(both).view(x_BND.shape), gate, out=x_BND)


def join(text_in: GatheredLinear, text: Tensor, image_in: GatheredLinear, image: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x_BND in `dtype`: for each image its text's rows, then its own."""
    num_text = text.shape[1]
    x_BND = empty((len(text), num_text + image.shape[1], text_in.width), dtype)
    for rows, some_text, some_image in zip(x_BND, text, image, strict=True):
        text_in(some_text.to(dtype), out=rows[:num_text])
        image_in(some_image, out=rows[num_text:])
    return x_BND


def project_out(x_BND: Tensor, modulation: Tensor, eps: float, output: GatheredLinear) -> Tensor:
    """Return output(norm(x)) [B, N, channels], fp32; halves of the modulation [B, 2 D] scale and shift the norm."""
    scale, shift = modulation.chunk(2, dim=1)
    result = torch.empty((*x_BND.shape[:2], output.width), dtype=torch.float32, device=x_BND.device)
    for b, rows in enumerate(x_BND):
        normed = ada_layer_norm(rows[None], scale[b : b + 1], shift[b : b + 1], eps)[0]
        output(normed, out=result[b])
    return result


NUM_WAVES = 256
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class FluxText:
    """Encoded text of B prompts."""

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
    """A block with linears from the conditioning to its shifts, scales and gates, one per stream."""

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
    image = double_stream_names(name, is_text=False, mlp=("net.0.proj", "net.2"))
    modulations = [f"{name}.norm1_context.linear", f"{name}.norm1.linear"]
    return ModulatedBlock(DoubleBlock(text, image, config), modulations, 6, config.width)


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
        self.image_in = GatheredLinear.named("x_embedder", width, config.in_channels, what="tokens", bias=True)
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
        return self.image_in.packed.dtype

    def layout(self, num_text: int, positions: Tensor, batch_size: int) -> Layout:
        """Return the layout of B images with tokens at `positions` int64 [3, tokens]: image number, row, column.

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
        """Return the velocity [B, tokens, out channels], fp32, of tokens [B, tokens, in channels].

        The timestep is in thousandths of the whole way; `guidance` is only for checkpoints that have it as an input.
        """
        assert (guidance is not None) == self.config.is_told_guidance
        x_BND = join(self.text_in, text.states, self.image_in, tokens, self.dtype)
        conditioning = silu(self._conditioning(timestep, text.pooled, guidance))

        def run(blocks: Sequence[ModulatedBlock]) -> None:
            for block in blocks:
                with scope():
                    block(x_BND, layout, conditioning)

        cache = cache or StepCache(0.0)
        cache.run(x_BND, lambda: run(self.blocks[:1]), lambda: run(self.blocks[1:]))
        return project_out(x_BND[:, layout.num_text :], self.modulation(conditioning), EPS, self.output)

    def _conditioning(self, timestep: float, pooled: Tensor, guidance: float | None) -> Tensor:
        """Return the conditioning [B, D], fp32."""
        device = pooled.device
        result = self.time(torch.tensor([timestep], device=device)) + self.pooled(pooled)
        if self.guidance is not None and guidance is not None:
            result = result + self.guidance(torch.tensor([guidance * 1000], device=device))
        return result


def build(config: Mapping[str, Any]) -> FluxTransformer:
    return FluxTransformer(FluxConfig.from_dict(config))
