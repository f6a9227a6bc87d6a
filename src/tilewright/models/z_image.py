"""Z-Image: its config and its transformer: latents and captions in, the velocity out.

Image and caption attend to each other as one sequence. T: packed tokens of all images, each its image's rows,
then its caption's, both padded to a multiple of 32 by learned rows; N: the image's patches. All images of a batch
are at the same noise level, so that one modulation holds for every row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.memory import StepCache
from tilewright.layers.norm import RmsNorm
from tilewright.models.text_config import integer, number
from tilewright.ops import backend
from tilewright.ops.activation import add, silu
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import qk_norm_rope, rope_qk
from tilewright.ops.norm import ada_layer_norm, ada_rms_norm, gated_add
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig
from tilewright.weights.conv import Unpacked

CLASS_NAME = "ZImageTransformer2DModel"
CONDITION_WIDTH = 256  # of the timestep's embedding, unless the model is narrower


@dataclass(frozen=True)
class ZImageConfig:
    width: int
    num_heads: int
    num_layers: int
    num_refiner_layers: int
    channels: int  # of latents
    patch_size: int
    caption_width: int
    eps: float
    qk_norm: bool
    rope_theta: float
    rope_widths: tuple[int, int, int]  # elements of a head rotated by the frame, the row and the column
    rope_lengths: tuple[int, int, int]  # positions of each axis
    time_scale: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ZImageConfig:
        width, num_heads = integer(config, "dim", 3840), integer(config, "n_heads", 30)
        if num_heads < 1 or width % num_heads:
            raise UnsupportedConfig(f"config has n_heads {num_heads}, expected a divisor of dim, {width}")
        if integer(config, "n_kv_heads", 30) != num_heads:
            raise UnsupportedConfig(f"config has n_kv_heads {config.get('n_kv_heads')}, expected n_heads, {num_heads}")
        if config.get("siglip_feat_dim") is not None:
            raise UnsupportedConfig("config has siglip_feat_dim: Z-Image-Omni, which reads images, is not supported")
        if list(config.get("all_f_patch_size", (1,))) != [1] or len(config.get("all_patch_size", (2,))) != 1:
            raise UnsupportedConfig(
                f"config has all_patch_size {config.get('all_patch_size')} and all_f_patch_size "
                f"{config.get('all_f_patch_size')}, expected one size, and 1 frame"
            )
        rope_widths = _triple(config, "axes_dims", (32, 48, 48))
        if sum(rope_widths) != width // num_heads or any(axis % 2 for axis in rope_widths):
            raise UnsupportedConfig(
                f"config has axes_dims {list(rope_widths)}, expected even ones with the sum of a head, "
                f"{width // num_heads}"
            )
        return cls(
            width=width,
            num_heads=num_heads,
            num_layers=integer(config, "n_layers", 30),
            num_refiner_layers=integer(config, "n_refiner_layers", 2),
            channels=integer(config, "in_channels", 16),
            patch_size=int(config.get("all_patch_size", (2,))[0]),
            caption_width=integer(config, "cap_feat_dim", 2560),
            eps=number(config, "norm_eps", 1e-5),
            qk_norm=bool(config.get("qk_norm", True)),
            rope_theta=number(config, "rope_theta", 256.0),
            rope_widths=rope_widths,
            rope_lengths=_triple(config, "axes_lens", (1024, 512, 512)),
            time_scale=number(config, "t_scale", 1000.0),
        )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def mlp_width(self) -> int:
        return int(self.width / 3 * 8)

    @property
    def condition_width(self) -> int:
        return min(self.width, CONDITION_WIDTH)

    @property
    def patch_width(self) -> int:
        """Values in a patch of latents."""
        return self.patch_size**2 * self.channels


def _triple(config: Mapping[str, Any], key: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
    values = config.get(key, default)
    if not isinstance(values, (list, tuple)) or len(values) != 3 or not all(type(value) is int for value in values):
        raise UnsupportedConfig(f"config has {key} {values!r}, expected three whole numbers")
    return values[0], values[1], values[2]


QK_EPS = 1e-5
FINAL_EPS = 1e-6
LENGTH_MULTIPLE = 32
FREQUENCY_WIDTH, TIME_WIDTH = 256, 1024  # of the timestep's embedding: its waves, and its inner width
MAX_PERIOD = 10000.0


@dataclass(frozen=True)
class PackedRows:
    """Sequences that attend within themselves: their bounds, and the rope of each row."""

    starts: Tensor  # int32 [B + 1]
    cos: Tensor  # fp32 [T, K/2]
    sin: Tensor


@dataclass(frozen=True)
class Prepared:
    """Constants of a run's steps: refined captions, and the bounds and rope of every row."""

    grid: tuple[int, int]  # rows and columns of patches
    images: PackedRows  # only the images
    joint: PackedRows  # images with their captions
    captions: tuple[Tensor, ...]  # refined and padded, of each image [L_i, D]
    image_slices: tuple[slice, ...]  # each image's part of the joint rows, with its padding

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]


class ZImageBlock:
    """x + gate * norm(attention(norm(x) * scale)), then the same with the gated MLP, updating x.

    Blocks of the context refiner have neither scales nor gates.
    """

    def __init__(self, name: str, config: ZImageConfig, *, is_modulated: bool) -> None:
        self.config = config
        width, inner_width = config.width, config.mlp_width
        own = partition.current()
        heads = own.heads("Z-Image", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        self.qkv = Linear([(f"{name}.attention.to_{part}", width, rows) for part in "qkv"], width)
        self.output = Linear([(f"{name}.attention.to_out.0", width)], width, column_shard=rows)
        if config.qk_norm:
            self.q_norm = Unpacked(f"{name}.attention.norm_q.weight", config.head_width)
            self.k_norm = Unpacked(f"{name}.attention.norm_k.weight", config.head_width)
        inner = own.width("Z-Image MLP width", inner_width)
        parts = [(f"{name}.feed_forward.{part}", inner_width, inner) for part in ("w1", "w3")]
        self.gate_up = Linear(parts, width, gated=True)
        self.down = Linear([(f"{name}.feed_forward.w2", width)], inner_width, column_shard=inner)
        self.attention_norm = RmsNorm(f"{name}.attention_norm1", width, config.eps)
        self.attended_norm = RmsNorm(f"{name}.attention_norm2", width, config.eps)
        self.mlp_norm = RmsNorm(f"{name}.ffn_norm1", width, config.eps)
        self.mlp_out_norm = RmsNorm(f"{name}.ffn_norm2", width, config.eps)
        # Whole on every rank: it multiplies a single row.
        self.modulation = (
            Linear([(f"{name}.adaLN_modulation.0", 4 * width)], config.condition_width, bias=True)
            if is_modulated
            else None
        )

    def __call__(self, x_TD: Tensor, rows: PackedRows, condition: Tensor | None) -> None:
        """Update x; `condition` [1, 256] is the timestep's embedding, None if the block has no modulation."""
        x = x_TD[None]  # the modulated norms take [images, rows, D]
        scale1 = gate1 = scale2 = gate2 = None
        if self.modulation is not None and condition is not None:
            scale1, gate1, scale2, gate2 = self.modulation(condition).chunk(4, dim=1)
            gate1.tanh_()
            gate2.tanh_()
        eps = self.config.eps
        h = ada_rms_norm(x, scale1, None, eps, weight=self.attention_norm.weight.value)
        attended = self.attended_norm(self._attend(h[0], rows))
        h = ada_rms_norm(attended[None], scale2, None, eps, weight=self.mlp_norm.weight.value, residual=x, gate=gate1)
        inner = self.gate_up(h[0], activation="silu")
        mlp_out = self.mlp_out_norm(self.down(inner))
        if gate2 is None:
            add(x_TD, mlp_out, out=x_TD)
        else:
            gated_add(x, mlp_out[None], gate2, out=x)

    def _attend(self, h_TD: Tensor, rows: PackedRows) -> Tensor:
        heads = self.num_heads
        q, k, v = self.qkv(h_TD).view(len(h_TD), 3 * heads, self.config.head_width).split(heads, dim=1)
        if self.config.qk_norm:
            weights = self.q_norm.value, self.k_norm.value
            qk_norm_rope(q, k, *weights, QK_EPS, rows.cos, rows.sin, interleaved=True)
        else:
            rope_qk(q, k, rows.cos, rows.sin, interleaved=True)
        attended = varlen_attention(q, k, v, rows.starts)
        return self.output(attended.view(len(h_TD), -1))


class TimeEmbedding:
    """Embedding of a timestep, fp32 [1, 256]: waves of it, then two products."""

    def __init__(self, name: str, config: ZImageConfig) -> None:
        self.first = Linear([(f"{name}.mlp.0", TIME_WIDTH)], FREQUENCY_WIDTH, bias=True)
        self.second = Linear([(f"{name}.mlp.2", config.condition_width)], TIME_WIDTH, bias=True)
        half = FREQUENCY_WIDTH // 2
        self.frequencies = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half) / half)

    def __call__(self, time: float) -> Tensor:
        angles = time * self.frequencies.to(backend.device())
        waves = torch.cat([angles.cos(), angles.sin()])[None]
        return self.second(self.first(waves, activation="silu"))


class FinalLayer:
    """Projection of rows [M, D] to patches of the velocity [M, patch width]."""

    def __init__(self, name: str, config: ZImageConfig) -> None:
        self.modulation = Linear([(f"{name}.adaLN_modulation.1", config.width)], config.condition_width, bias=True)
        self.linear = Linear([(f"{name}.linear", config.patch_width)], config.width, bias=True)

    def __call__(self, x_MD: Tensor, condition: Tensor) -> Tensor:
        scale = self.modulation(silu(condition))
        return self.linear(ada_layer_norm(x_MD[None], scale, None, FINAL_EPS)[0])


class ZImageTransformer:
    def __init__(self, config: ZImageConfig) -> None:
        self.config = config
        size = f"{config.patch_size}-1"
        width = config.width
        self.patch_embedding = Linear([(f"all_x_embedder.{size}", width)], config.patch_width, bias=True)
        self.final = FinalLayer(f"all_final_layer.{size}", config)
        refiners = range(config.num_refiner_layers)
        self.noise_refiner = [ZImageBlock(f"noise_refiner.{i}", config, is_modulated=True) for i in refiners]
        self.context_refiner = [ZImageBlock(f"context_refiner.{i}", config, is_modulated=False) for i in refiners]
        self.time_embedding = TimeEmbedding("t_embedder", config)
        self.caption_norm = RmsNorm("cap_embedder.0", config.caption_width, config.eps)
        self.caption_embedding = GatheredLinear.named(
            "cap_embedder.1", width, config.caption_width, what="Z-Image caption width", bias=True
        )
        self.image_padding = Unpacked("x_pad_token", 1, width)
        self.caption_padding = Unpacked("cap_pad_token", 1, width)
        self.layers = [ZImageBlock(f"layers.{i}", config, is_modulated=True) for i in range(config.num_layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.image_padding.value.dtype

    def checkpoint_name(self, name: str) -> str | None:
        return name

    def prepare(self, captions: Sequence[Tensor], owners: Sequence[int], height: int, width: int) -> Prepared:
        """Return the constants of a run's steps, for latents of `height` x `width`.

        `captions` [L, caption width] are refined once each, though several images may share one: `owners[i]` is the
        index of image i's caption.
        """
        patch = self.config.patch_size
        grid = height // patch, width // patch
        refined = self._refine(captions)
        places = [_image_places(grid, len(refined[owner])) for owner in owners]
        lengths = [len(place) for place in places]
        joint_places = [torch.cat([places[i], _caption_places(len(refined[owner]))]) for i, owner in enumerate(owners)]
        joint_lengths = [len(place) for place in joint_places]
        begins = [sum(joint_lengths[:i]) for i in range(len(owners))]
        return Prepared(
            grid,
            self._rows(lengths, places),
            self._rows(joint_lengths, joint_places),
            tuple(refined[owner] for owner in owners),
            tuple(slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)),
        )

    def __call__(self, latents: Tensor, time: float, prepared: Prepared, cache: StepCache | None = None) -> Tensor:
        """Return the velocity, in the model's type, of latents [B, 1, h, w, C] at `time`: 0 is noise, 1 the image."""
        condition = self.time_embedding(time * self.config.time_scale)
        num_images, num_patches = len(latents), prepared.num_patches
        x_MD = self._embed_patches(latents, prepared)
        for block in self.noise_refiner:
            with scope():
                block(x_MD, prepared.images, condition)
        x_TD = empty((len(prepared.joint.cos), self.config.width), x_MD.dtype)
        images = x_MD.view(num_images, -1, self.config.width)
        for image, caption, own in zip(images, prepared.captions, prepared.image_slices, strict=True):
            x_TD[own] = image
            x_TD[own.stop : own.stop + len(caption)] = caption
        (cache or StepCache(0.0)).run(
            x_TD,
            lambda: self._run(self.layers[:1], x_TD, prepared.joint, condition),
            lambda: self._run(self.layers[1:], x_TD, prepared.joint, condition),
        )
        patches = torch.cat([x_TD[own.start : own.start + num_patches] for own in prepared.image_slices])
        return self._unpatchify(self.final(patches, condition), latents.shape)

    def _run(self, blocks: Sequence[ZImageBlock], x_TD: Tensor, rows: PackedRows, condition: Tensor) -> None:
        for block in blocks:
            with scope():
                block(x_TD, rows, condition)

    def _embed_patches(self, latents: Tensor, prepared: Prepared) -> Tensor:
        """Return rows of all images, padded [B * (N + padding), D]."""
        batch, channels = latents.shape[0], latents.shape[-1]
        patch, (rows, columns) = self.config.patch_size, prepared.grid
        patches = latents.to(self.dtype).view(batch, rows, patch, columns, patch, channels).transpose(2, 3)
        x = self.image_padding.value.expand(len(prepared.images.cos), -1).clone().view(batch, -1, self.config.width)
        for image, own in zip(patches, x, strict=True):
            self.patch_embedding(image.reshape(rows * columns, -1), out=own[: rows * columns])
        return x.view(-1, self.config.width)

    def _unpatchify(self, patches: Tensor, shape: torch.Size) -> Tensor:
        patch, (batch, _, height, width, channels) = self.config.patch_size, shape
        grid = patches.view(batch, height // patch, width // patch, patch, patch, channels)
        return grid.transpose(2, 3).reshape(shape)

    def _refine(self, captions: Sequence[Tensor]) -> list[Tensor]:
        """Return each caption embedded, padded and refined [L_i + padding, D]."""
        embedded = self.caption_embedding(self.caption_norm(torch.cat([text.to(self.dtype) for text in captions])))
        padding = self.caption_padding.value
        padded = [
            torch.cat([text, padding.expand(-len(text) % LENGTH_MULTIPLE, -1)])
            for text in embedded.split([len(text) for text in captions])
        ]
        lengths = [len(text) for text in padded]
        x_TD = torch.cat(padded)
        rows = self._rows(lengths, [_caption_places(length) for length in lengths])
        for block in self.context_refiner:
            with scope():
                block(x_TD, rows, None)
        return list(x_TD.split(lengths))

    def _rows(self, lengths: Sequence[int], places: Sequence[Tensor]) -> PackedRows:
        """Return bounds and rope of rows. Angles are fp64 products: fp32 ones lose digits of the position."""
        config = self.config
        angles = torch.cat(
            [
                torch.cat(list(places))[:, axis, None].double()
                / config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
                for axis, width in enumerate(config.rope_widths)
            ],
            dim=1,
        )
        device = backend.device()
        starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return PackedRows(starts, angles.cos().float().to(device), angles.sin().float().to(device))


def _caption_places(length: int) -> Tensor:
    """Return positions [L, 3] of a padded caption, which runs along the first axis from 1 on."""
    places = torch.zeros(length, 3, dtype=torch.int64)
    places[:, 0] = torch.arange(1, length + 1)
    return places


def _image_places(grid: tuple[int, int], caption_length: int) -> Tensor:
    """Return positions [N + padding, 3] of an image, after its caption on the first axis; padding is at 0."""
    rows, columns = grid
    num_patches = rows * columns
    places = torch.zeros(num_patches + -num_patches % LENGTH_MULTIPLE, 3, dtype=torch.int64)
    places[:num_patches, 0] = caption_length + 1
    places[:num_patches, 1] = torch.arange(rows).repeat_interleave(columns)
    places[:num_patches, 2] = torch.arange(columns).repeat(rows)
    return places


def build(config: Mapping[str, Any]) -> ZImageTransformer:
    """Return the network that transformer/config.json describes, without weights."""
    name = config.get("_class_name", CLASS_NAME)
    if name != CLASS_NAME:
        raise UnsupportedConfig(f"_class_name is {name!r}, expected {CLASS_NAME}")
    return ZImageTransformer(ZImageConfig.from_dict(config))
