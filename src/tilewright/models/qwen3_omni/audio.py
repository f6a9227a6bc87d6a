"""The audio tower of Qwen3-Omni: log-mel frames of several sounds in, features of each out, in one pass.

A sound is cut into chunks of a second, each convolved separately. Attention sees a window of chunks, so that a long
sound may come in pieces of whole windows. N: features of all sounds. B chunks, L mel frames, M mel bins, T frames and F
bins after the convolutions, C channels, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import starts_of
from tilewright.layers.conv import Conv2d
from tilewright.layers.linear import Linear
from tilewright.layers.norm import LayerNorm
from tilewright.models.protocol import MediaBatch, MediaItem
from tilewright.models.qwen3_omni.config import AudioConfig, halved
from tilewright.ops import backend
from tilewright.ops.attention import varlen_attention
from tilewright.ops.plan import empty, scope

EPS = 1e-5
MAX_TIMESCALE = 10_000.0
# The first convolution's result for a chunk is 3 MB in bf16: 16 of them stay within the last-level cache of a server.
CHUNKS_PER_PASS = 16


class AudioBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)), updating x."""

    def __init__(self, name: str, config: AudioConfig) -> None:
        self.config = config
        width = config.width
        self.norm1 = LayerNorm(f"{name}.self_attn_layer_norm", width, EPS)
        own = partition.current()
        heads = own.heads("audio", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        self.qkv = Linear(
            [(f"{name}.self_attn.{part}_proj", width, rows) for part in ("q", "k", "v")], width, bias=True
        )
        self.output = Linear([(f"{name}.self_attn.out_proj", width)], width, column_shard=rows, bias=True)
        self.norm2 = LayerNorm(f"{name}.final_layer_norm", width, EPS)
        inner = own.width("audio MLP width", config.mlp_width)
        self.mlp_in = Linear([(f"{name}.fc1", config.mlp_width, inner)], width, bias=True)
        self.mlp_out = Linear([(f"{name}.fc2", width)], config.mlp_width, column_shard=inner, bias=True)

    def __call__(self, x_ND: Tensor, window_starts: Tensor) -> None:
        qkv = self.qkv(self.norm1(x_ND)).view(len(x_ND), 3 * self.num_heads, self.config.head_width)
        q, k, v = qkv.split(self.num_heads, dim=1)
        attended = varlen_attention(q, k, v, window_starts, max_length=self.config.features_per_window)
        self.output(attended.view(len(x_ND), -1), residual=x_ND, out=x_ND)
        inner = self.mlp_in(self.norm2(x_ND), activation=self.config.activation)
        self.mlp_out(inner, residual=x_ND, out=x_ND)


class Downsampling:
    """Three convolutions over mel bins and time, and a projection: the embeddings [B, T, D] of chunks [B, L, M].

    Chunks are distributed over the ranks: the convolutions are a fifth of the tower's work, their weights little.
    """

    def __init__(self, name: str, config: AudioConfig) -> None:
        self.config = config
        self._group = partition.current().group
        channels = config.conv_channels
        self.convs = [Conv2d(f"{name}.conv2d{i}", 1 if i == 1 else channels, channels, stride=2) for i in range(1, 4)]
        self.projection = Linear([(f"{name}.conv_out", config.width)], channels * config.bins_after_convs)

    @property
    def dtype(self) -> torch.dtype:
        return self.convs[0].dtype

    def __call__(self, chunks_BLM: Tensor, positions_TD: Tensor) -> Tensor:
        num_chunks, rank = len(chunks_BLM), self._group.rank
        share = -(-num_chunks // self._group.size)
        own = chunks_BLM[rank * share : (rank + 1) * share]
        num_frames = len(positions_TD)
        out = torch.zeros(share, num_frames, self.config.width, dtype=self.dtype, device=chunks_BLM.device)
        for first in range(0, len(own), CHUNKS_PER_PASS):
            with scope():
                part = own[first : first + CHUNKS_PER_PASS]
                self._embed(part, positions_TD, out[first : first + len(part)])
        return self._group.all_gather(out)[:num_chunks]

    def _embed(self, chunks_BLM: Tensor, positions_TD: Tensor, out_BTD: Tensor) -> None:
        x = chunks_BLM.transpose(1, 2).contiguous().unsqueeze(-1)
        for conv in self.convs:
            x = conv(x, activation="gelu_erf")
        rows = out_BTD.shape[0] * out_BTD.shape[1]
        columns_RK = x.permute(0, 2, 3, 1).reshape(rows, -1)  # [B, F, T, C] to a row [C, F] of each frame
        out_RD = out_BTD.view(rows, -1)
        out_RD.copy_(positions_TD.repeat(out_BTD.shape[0], 1))
        self.projection(columns_RK, residual=out_RD, out=out_RD)


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a sound: its index among those of its length, and how many of its features are the sound's."""

    length: int
    index: int
    num_features: int


class AudioTower:
    def __init__(self, name: str, config: AudioConfig) -> None:
        self.config = config
        self.downsampling = Downsampling(name, config)
        self.blocks = [AudioBlock(f"{name}.layers.{i}", config) for i in range(config.num_layers)]
        self.norm = LayerNorm(f"{name}.ln_post", config.width, EPS)
        inner = partition.current().width("audio projection", config.width)
        self.proj1 = Linear([(f"{name}.proj1", config.width, inner)], config.width, bias=True)
        self.proj2 = Linear([(f"{name}.proj2", config.output_width)], config.width, column_shard=inner, bias=True)
        self.positions = sinusoids(config.features_per_chunk, config.width).to(backend.device())

    def __call__(self, batch: MediaBatch) -> list[Tensor]:
        """Return features [n, output width] of each sound; its grid is (frames of padded chunks, frames, bins)."""
        config = self.config
        counts = [config.num_features(item.grid[1]) for item in batch.items]
        x_ND = self._embed(batch)
        window_starts = _window_starts(counts, config.features_per_window)
        for block in self.blocks:
            with scope():
                block(x_ND, window_starts)
        features = torch.empty(len(x_ND), config.output_width, dtype=x_ND.dtype, device=x_ND.device)
        self.proj2(self.proj1(self.norm(x_ND), activation=config.activation), out=features)
        return list(features.split(counts))

    def _embed(self, batch: MediaBatch) -> Tensor:
        """Return the inputs of the first block [N, D]; chunks of one length are convolved together."""
        by_length: dict[int, list[Tensor]] = {}
        chunks: list[_Chunk] = []
        for item in batch.items:
            length = item.grid[0]
            of_length = by_length.setdefault(length, [])
            for frames in _frames(batch, item).split(length):
                chunks.append(_Chunk(length, len(of_length), halved(len(frames))))
                of_length.append(frames)
        embedded = {length: self._embed_chunks(length, frames) for length, frames in by_length.items()}
        rows = [embedded[chunk.length][chunk.index, : chunk.num_features] for chunk in chunks]
        first = rows[0]
        return torch.cat(rows, out=empty((sum(map(len, rows)), first.shape[1]), first.dtype))

    def _embed_chunks(self, length: int, chunks: Sequence[Tensor]) -> Tensor:
        """Return embeddings [B, T, D] of chunks [frames, M], the shorter ones padded with zeros."""
        dtype = self.downsampling.dtype
        padded = torch.zeros(len(chunks), length, self.config.num_mel_bins, dtype=dtype, device=chunks[0].device)
        for index, frames in enumerate(chunks):
            padded[index, : len(frames)] = frames
        return self.downsampling(padded, self.positions[: halved(length)].to(dtype))


def _frames(batch: MediaBatch, item: MediaItem) -> Tensor:
    """Return the mel frames [frames, M] of a sound, which fill the buffer's rows contiguously, whatever their width."""
    _, num_frames, num_bins = item.grid
    return batch.rows([item]).flatten()[: num_frames * num_bins].view(num_frames, num_bins)


def _window_starts(counts: Sequence[int], window: int) -> Tensor:
    lengths = [min(window, count - first) for count in counts for first in range(0, count, window)]
    return starts_of(lengths)


def sinusoids(length: int, width: int) -> Tensor:
    """Return positions [length, width], fp32: sines of falling frequencies, then cosines of the same."""
    steps = width // 2
    frequencies = torch.exp(-math.log(MAX_TIMESCALE) / (steps - 1) * torch.arange(steps, dtype=torch.float32))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
