"""Blocks that FLUX.1 and FLUX.2 are made of: text and picture attend to both.

x_BND: N rows of each of B pictures, those of its text first. In a double-stream block text and picture have weights of
their own, in a single-stream block all rows have the same, and attention and MLP are computed side by side.

A stream's rows of one picture are neighbours, so products write queries, keys and values where joint attention reads
them: nothing is copied. Several pictures are then several products, of hundreds of rows each, whose weights cost little
to read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.rope import AxialRope
from tilewright.ops import backend
from tilewright.ops.ada_norm import ada_layer_norm, gated_add
from tilewright.ops.attention import varlen_attention
from tilewright.ops.plan import empty
from tilewright.ops.rope import qk_norm_rope
from tilewright.weights.shard import Shard
from tilewright.weights.unpacked import Unpacked


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


# Shift, scale and gate, each [B, D]: a norm is multiplied by 1 + scale and shifted, what is added multiplied by gate.
Modulation = Sequence[Tensor]


@dataclass(frozen=True)
class Layout:
    """Where rows are: the text's length, the bounds of pictures in the packed rows, and every row's rope."""

    num_text: int
    starts: Tensor  # int32 [B + 1]
    cos: Tensor  # [B * N, R / 2]
    sin: Tensor

    @property
    def num_rows(self) -> int:
        """Of one picture and its text."""
        return len(self.cos) // (len(self.starts) - 1)

    @property
    def streams(self) -> tuple[slice, slice]:
        """The rows of text and picture."""
        return slice(0, self.num_text), slice(self.num_text, self.num_rows)


def layout_of(rope: AxialRope, text: Tensor, picture: Tensor, batch_size: int) -> Layout:
    """Of the positions int64 [axes, tokens] of text and picture, the same for all of a batch."""
    positions = torch.cat([text, picture], dim=1)
    cos, sin = rope.tables(positions)
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=backend.device()) * positions.shape[1]
    return Layout(text.shape[1], starts, cos.repeat(batch_size, 1), sin.repeat(batch_size, 1))


def grid_positions(picture: int, rows: int, columns: int) -> Tensor:
    """Picture number, row and column of each token of a grid, row by row: int64 [3, rows * columns]."""
    axes = torch.meshgrid(torch.tensor([picture]), torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])


@dataclass(frozen=True)
class StreamNames:
    """What a checkpoint calls a stream's weights."""

    qkv: tuple[str, str, str]
    q_norm: str
    k_norm: str
    output: str
    mlp_in: str
    mlp_out: str


def double_stream_names(name: str, *, is_text: bool, mlp: tuple[str, str]) -> StreamNames:
    """Of a stream of the double-stream block `name`; the MLP's linears are called otherwise in each family."""
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


class Stream:
    """The weights that text or picture have for themselves in a double-stream block."""

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
        """Writes queries, keys and values, normed and turned."""
        config, (shift, scale, _) = self.config, modulation
        self.qkv(ada_layer_norm(x_1ND, scale, shift, config.eps)[0], out=qkv_NC)
        q, k, _ = qkv_NC.view(len(qkv_NC), 3 * self.num_heads, -1).split(self.num_heads, dim=1)
        qk_norm_rope(q, k, self.q_norm.value, self.k_norm.value, config.eps, cos, sin, interleaved=True)

    def update(self, x_1ND: Tensor, attended_NC: Tensor, modulation: Modulation) -> None:
        """x + gate * output, then x + gate * mlp(norm(x)); the modulation is the attention's, then the MLP's."""
        config = self.config
        _, _, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        projected = self.output(attended_NC)[None]
        normed = ada_layer_norm(projected, mlp_scale, mlp_shift, config.eps, residual=x_1ND, gate=gate)
        inner = self.mlp_in(normed, activation=config.activation)
        gated_add(x_1ND, self.mlp_out(inner), mlp_gate, out=x_1ND)


def mlp_in(name: str, config: BlockConfig, inner: Shard, *, first_row: int = 0, num_rows: int | None = None) -> Linear:
    """The MLP's first product, of this rank's `inner` entries. What is gated is one tensor, gate then up.

    It may lie in a larger tensor of `num_rows`, from `first_row` on.
    """
    width = config.mlp_width
    count = 2 if config.gated else 1
    total = count * width if num_rows is None else num_rows
    parts = [(name, total, inner.after(first_row + part * width)) for part in range(count)]
    return Linear(parts, config.width, bias=config.bias, gated=config.gated)


class DoubleBlock:
    """Joint attention, then MLPs, with weights for text and for picture, updating x."""

    def __init__(self, text: StreamNames, picture: StreamNames, config: BlockConfig) -> None:
        self.config = config
        self.streams = Stream(text, config), Stream(picture, config)

    def __call__(self, x_BND: Tensor, layout: Layout, modulations: tuple[Modulation, Modulation]) -> None:
        """Modulations of text and of picture, each of six: attention's, then the MLP's."""
        batch_size, num_rows, _ = x_BND.shape
        heads, width = self.streams[0].num_heads, self.config.head_width
        qkv = empty((batch_size, num_rows, 3 * heads * width), x_BND.dtype)
        # Of each picture's text and picture: stream, rows of x, modulation.
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
        """`fused_input` names a tensor that has q, k, v and the MLP's first product; without it they are apart."""
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


def join(
    text_in: GatheredLinear, text: Tensor, picture_in: GatheredLinear, picture: Tensor, dtype: torch.dtype
) -> Tensor:
    """x_BND in `dtype`: of each picture its text's rows, then its own."""
    num_text = text.shape[1]
    x_BND = empty((len(text), num_text + picture.shape[1], text_in.width), dtype)
    for rows, some_text, some_picture in zip(x_BND, text, picture, strict=True):
        text_in(some_text.to(dtype), out=rows[:num_text])
        picture_in(some_picture, out=rows[num_text:])
    return x_BND


def project_out(x_BND: Tensor, modulation: Tensor, eps: float, output: GatheredLinear) -> Tensor:
    """output(norm(x)) [B, N, channels], fp32, the norm scaled and shifted by the halves of the modulation [B, 2 D]."""
    scale, shift = modulation.chunk(2, dim=1)
    result = torch.empty((*x_BND.shape[:2], output.width), dtype=torch.float32, device=x_BND.device)
    for b, rows in enumerate(x_BND):
        normed = ada_layer_norm(rows[None], scale[b : b + 1], shift[b : b + 1], eps)[0]
        output(normed, out=result[b])
    return result
