"""Wan: its config and its transformer: latents of videos in, their velocities out.

B: videos, F, H, W: latent frames, rows and columns, C channels. N: patches of a video, D: width, M: tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import starts_of
from tilewright.layers.embedding import TimestepEmbedding
from tilewright.layers.linear import GatheredLinear, Linear, PatchEmbedding
from tilewright.layers.memory import StepCache
from tilewright.layers.norm import SplitRmsNorm
from tilewright.layers.rope import AxialRope
from tilewright.models.text_config import Config, integer, number
from tilewright.ops import backend
from tilewright.ops.activation import silu
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import rope_qk
from tilewright.ops.norm import ada_layer_norm, gated_add
from tilewright.ops.plan import empty, scope
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights.conv import Unpacked


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
        """Values that the transformer returns per patch."""
        return self.out_channels * math.prod(self.patch_size)

    @property
    def rope_widths(self) -> tuple[int, int, int]:
        """Elements of a head rotated by the frame, the row and the column."""
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
                f"config has {key} {config[key]!r}, expected null: a Wan transformer that reads an image through CLIP "
                "(Wan 2.1 image-to-video) is not supported; Wan 2.2 TI2V animates images"
            )
    for key, built in (("qk_norm", "rms_norm_across_heads"), ("cross_attn_norm", True)):
        if config.get(key, built) != built:
            raise UnsupportedConfig(f"config has {key} {config[key]!r}, expected {built!r}")


ROPE_THETA = 10000.0


@dataclass(frozen=True)
class WanText:
    """Texts as inputs of the layers, the same at all steps. Consecutive videos share a text, equally many each."""

    lengths: list[int]
    keys_values: list[Tensor]  # of each layer [sum of lengths, 2 x this rank's heads, K]

    def first(self) -> WanText:
        """Return the first text alone."""
        return WanText(self.lengths[:1], [rows[: self.lengths[0]] for rows in self.keys_values])


@dataclass(frozen=True)
class _Places:
    """Rope and sequence bounds of a batch's patches, and the texts they attend to."""

    starts: Tensor  # int32 [B + 1], bounds of the videos
    cos: Tensor  # fp32 [B * N, K / 2]
    sin: Tensor
    readers: Tensor  # int32 [texts + 1], bounds of the patches that read each text
    texts: Tensor  # int32 [texts + 1], bounds of the texts


class SelfAttention:
    """Attention among a video's patches. q and k are normed over all heads together, before rope."""

    def __init__(self, name: str, config: WanConfig) -> None:
        width = config.width
        heads = partition.current().heads("attention", config.num_heads, None, config.head_width)
        self.num_heads, self.head_width = heads.num_queries, config.head_width
        rows = heads.queries.times(config.head_width)
        self.qkv = Linear([(f"{name}.to_{part}", width, rows) for part in "qkv"], width, bias=True)
        self.norm_q = SplitRmsNorm(f"{name}.norm_q", width, config.eps, rows)
        self.norm_k = SplitRmsNorm(f"{name}.norm_k", width, config.eps, rows)
        self.output = Linear([(f"{name}.to_out.0", width)], width, column_shard=rows, bias=True)

    def __call__(self, h_TD: Tensor, places: _Places) -> Tensor:
        qkv = self.qkv(h_TD)
        own_width = self.num_heads * self.head_width
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in qkv.split(own_width, dim=1))
        self.norm_q.normed_in_place(qkv[:, :own_width])
        self.norm_k.normed_in_place(qkv[:, own_width : 2 * own_width])
        rope_qk(q, k, places.cos, places.sin, interleaved=True)
        return self.output(varlen_attention(q, k, v, places.starts).flatten(1))


class TextAttention:
    """x + attention of a video's patches to its text, updating x."""

    def __init__(self, name: str, config: WanConfig) -> None:
        width = config.width
        heads = partition.current().heads("attention", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        self.q = Linear([(f"{name}.to_q", width, rows)], width, bias=True)
        self.kv = Linear([(f"{name}.to_{part}", width, rows) for part in "kv"], width, bias=True)
        self.norm_q = SplitRmsNorm(f"{name}.norm_q", width, config.eps, rows)
        self.norm_k = SplitRmsNorm(f"{name}.norm_k", width, config.eps, rows)
        self.output = Linear([(f"{name}.to_out.0", width)], width, column_shard=rows, bias=True)

    def keys_values(self, text_SD: Tensor) -> Tensor:
        """Return keys and values [S, 2 x heads, K] of all texts' rows, in their own memory: they outlive a step."""
        kv = self.kv(text_SD, out=text_SD.new_empty(len(text_SD), self.kv.packed.n))
        self.norm_k.normed_in_place(kv[:, : kv.shape[1] // 2])
        return kv.unflatten(1, (2 * self.num_heads, -1))

    def __call__(self, x_TD: Tensor, h_TD: Tensor, kv: Tensor, places: _Places) -> None:
        q = self.q(h_TD)
        self.norm_q.normed_in_place(q)
        k, v = kv.split(self.num_heads, dim=1)
        attended = varlen_attention(q.unflatten(1, (self.num_heads, -1)), k, v, places.readers, places.texts)
        self.output(attended.flatten(1), residual=x_TD, out=x_TD)


class WanBlock:
    """Self-attention, cross-attention to the text, MLP; timesteps scale, shift and gate the first and the last."""

    def __init__(self, name: str, config: WanConfig) -> None:
        self.config = config
        width = config.width
        self.self_attention = SelfAttention(f"{name}.attn1", config)
        self.text_attention = TextAttention(f"{name}.attn2", config)
        self.text_norm = Unpacked(f"{name}.norm2.weight", width, in_fp32=True)
        self.text_norm_bias = Unpacked(f"{name}.norm2.bias", width, in_fp32=True)
        inner = partition.current().width("MLP width", config.mlp_width)
        self.mlp_in = Linear([(f"{name}.ffn.net.0.proj", config.mlp_width, inner)], width, bias=True)
        self.mlp_out = Linear([(f"{name}.ffn.net.2", width)], config.mlp_width, column_shard=inner, bias=True)
        self.modulation = Unpacked(f"{name}.scale_shift_table", 1, 6, width, in_fp32=True)

    def __call__(self, x_BND: Tensor, steps: Tensor, kv: Tensor, places: _Places) -> None:
        """Update x; `steps` is the modulation: fp32 [B, 6, D], or [B, F, 6, D] if each frame has its own timestep."""
        eps, x_TD = self.config.eps, x_BND.flatten(0, 1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _each(self.modulation.value + steps)
        normed = ada_layer_norm(x_BND, scale, shift, eps)
        attended = self.self_attention(normed.flatten(0, 1), places).view_as(x_BND)
        weight, bias = self.text_norm.value, self.text_norm_bias.value
        normed = ada_layer_norm(attended, None, None, eps, weight=weight, bias=bias, residual=x_BND, gate=gate)
        self.text_attention(x_TD, normed.flatten(0, 1), kv, places)
        normed = ada_layer_norm(x_BND, mlp_scale, mlp_shift, eps)
        inner = self.mlp_in(normed.flatten(0, 1), activation="gelu_tanh")
        gated_add(x_BND, self.mlp_out(inner).view_as(x_BND), mlp_gate, out=x_BND)


def _each(modulation: Tensor) -> Sequence[Tensor]:
    """Return the modulation's parts in the ops' shape: [B, D] of [B, n, D], and [B, F, 1, D] of [B, F, n, D]."""
    return modulation.unbind(1) if modulation.dim() == 3 else modulation.split(1, dim=2)


class WanTransformer:
    def __init__(self, config: WanConfig) -> None:
        self.config = config
        width = config.width
        embedder = "condition_embedder"
        self.patch_embedding = PatchEmbedding("patch_embedding", (width, config.in_channels, *config.patch_size))
        self.time_embedding = TimestepEmbedding(f"{embedder}.time_embedder", config.num_waves, width)
        self.time_projection = GatheredLinear.named(
            f"{embedder}.time_proj", 6 * width, width, what="modulation", bias=True
        )
        inner = partition.current().width("text embedding", width)
        self.text_in = Linear([(f"{embedder}.text_embedder.linear_1", width, inner)], config.text_width, bias=True)
        self.text_out = Linear([(f"{embedder}.text_embedder.linear_2", width)], width, column_shard=inner, bias=True)
        self.blocks = [WanBlock(f"blocks.{i}", config) for i in range(config.num_layers)]
        self.modulation = Unpacked("scale_shift_table", 1, 2, width, in_fp32=True)
        self.output = GatheredLinear.named("proj_out", config.patch_width, width, what="patches", bias=True)
        self.rope = AxialRope(config.rope_widths, ROPE_THETA)

    @staticmethod
    def checkpoint_name(name: str) -> str | None:
        """Return the name; None for a norm in some checkpoints that no version of the model reads."""
        return None if "norm_added_q" in name else name

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.dtype

    def embed_text(self, texts: Sequence[Tensor]) -> WanText:
        """Return keys and values of all layers for texts [M, text width], once for all steps."""
        rows = torch.cat([text.to(backend.device(), self.dtype) for text in texts])
        embedded = self.text_out(self.text_in(rows, activation="gelu_tanh"))
        return WanText(
            lengths=[len(text) for text in texts],
            keys_values=[block.text_attention.keys_values(embedded) for block in self.blocks],
        )

    def __call__(self, latents: Tensor, timesteps: Tensor, text: WanText, cache: StepCache | None = None) -> Tensor:
        """Return the velocity [B, F, H, W, C], fp32, of latents [B, F, H, W, C], at timesteps [B], or [B, F] by frame.

        With fewer texts than videos, each text belongs to equally many consecutive videos. `cache` carries results
        between steps.
        """
        grid = self._grid(latents, text)
        x_BND = self._embed_patches(latents, grid)
        temb = self.time_embedding(timesteps.flatten())
        steps = self.time_projection(silu(temb)).unflatten(0, timesteps.shape).unflatten(-1, (6, -1))
        places = self._places(len(latents), grid, text.lengths)
        layers = list(zip(self.blocks, text.keys_values, strict=True))

        def run(some: list[tuple[WanBlock, Tensor]]) -> None:
            for block, kv in some:
                with scope():
                    block(x_BND, steps, kv, places)

        (cache or StepCache(0.0)).run(x_BND, lambda: run(layers[:1]), lambda: run(layers[1:]))
        shift, scale = _each(self.modulation.value + temb.unflatten(0, timesteps.shape).unsqueeze(-2))
        normed = ada_layer_norm(x_BND, scale, shift, self.config.eps)
        patches = self.output(normed.flatten(0, 1), out_dtype=torch.float32)
        return self._unpatched(patches, len(latents), grid)

    def _grid(self, latents: Tensor, text: WanText) -> tuple[int, int, int]:
        """Return the number of patches along each axis."""
        batch, *sizes, channels = latents.shape
        config = self.config
        if channels != config.in_channels or batch % len(text.lengths):
            raise ValueError(
                f"latents are {list(latents.shape)}, expected {config.in_channels} channels, and a multiple of "
                f"{len(text.lengths)} videos: as many for each text"
            )
        frames, rows, columns = (size // patch for size, patch in zip(sizes, config.patch_size, strict=True))
        if any(size % patch for size, patch in zip(sizes, config.patch_size, strict=True)):
            raise ValueError(f"latents are {list(latents.shape)}, expected multiples of {config.patch_size}")
        if max(frames, rows, columns) > config.max_positions:
            raise RequestError(
                f"a video of {frames} x {rows} x {columns} patches is too large, expected at most "
                f"{config.max_positions} along each axis"
            )
        return frames, rows, columns

    def _embed_patches(self, latents: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Return embedded patches [B, N, D]; the convolution reads a patch's values channel by channel."""
        patches = _split_axes(latents.to(self.dtype), grid, self.config.patch_size)
        patches = patches.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4).flatten(0, 3)
        x_TD = empty((len(patches), self.config.width), self.dtype)
        self.patch_embedding(patches, is_still=False, out=x_TD)
        return x_TD.unflatten(0, (len(latents), -1))

    def _unpatched(self, patches: Tensor, batch: int, grid: tuple[int, int, int]) -> Tensor:
        """Return [B, F, H, W, C] from the last layer's patches, whose values are channels last."""
        frames, rows, columns = self.config.patch_size
        blocks = patches.view(batch, *grid, frames, rows, columns, self.config.out_channels)
        return blocks.permute(0, 1, 4, 2, 5, 3, 6, 7).flatten(5, 6).flatten(3, 4).flatten(1, 2)

    def _places(self, batch: int, grid: tuple[int, int, int], text_lengths: list[int]) -> _Places:
        device = backend.device()
        axes = torch.meshgrid(*(torch.arange(size, device=device) for size in grid), indexing="ij")
        positions = torch.stack([axis.flatten() for axis in axes])
        cos, sin = self.rope.tables(positions)
        num_patches, num_texts = positions.shape[1], len(text_lengths)
        return _Places(
            starts=starts_of([num_patches] * batch),
            cos=cos.repeat(batch, 1),
            sin=sin.repeat(batch, 1),
            readers=starts_of([num_patches * (batch // num_texts)] * num_texts),
            texts=starts_of(text_lengths),
        )


def _split_axes(latents: Tensor, grid: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """Split the axes of latents into patches: [B, F, pf, H, ph, W, pw, C]."""
    sizes = [size for pair in zip(grid, patch_size, strict=True) for size in pair]
    return latents.reshape(latents.shape[0], *sizes, latents.shape[-1])


def build(config: Mapping[str, Any]) -> WanTransformer:
    return WanTransformer(WanConfig.from_dict(config))
