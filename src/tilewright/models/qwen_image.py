"""Qwen-Image: its config and its transformer: patches of images and their texts in, velocities of the patches out.

Two streams, each with its own weights, attend to each other in every block. All images of a batch have the same size
and timestep; texts have their own lengths. N: patches of an image, T: patches of all, S: tokens of all texts. Images
to edit are further patches of each image, R in all, that are read and not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import starts_of
from tilewright.layers.embedding import TimestepEmbedding
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.layers.memory import StepCache
from tilewright.layers.norm import RmsNorm
from tilewright.layers.rope import AxialRope
from tilewright.models.text_config import Config, integer
from tilewright.ops.activation import silu
from tilewright.ops.attention import varlen_attention
from tilewright.ops.embedding import qk_norm_rope
from tilewright.ops.norm import ada_layer_norm, gated_add
from tilewright.ops.plan import scope
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights.conv import Unpacked

# Options of other versions of the model: a layered one, and one with guidance as an input.
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
    rope_widths: tuple[int, int, int]  # elements of a head rotated by the frame, the row and the column
    has_still_references: bool  # images to edit are at timestep 0, not at that of the generated image

    @classmethod
    def from_dict(cls, config: Config) -> QwenImageConfig:
        for key in NOT_BUILT:
            if config.get(key):
                raise UnsupportedConfig(f"config has {key} {config[key]!r}, expected false: it is not supported")
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
        """Values that the transformer returns per patch."""
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


EPS = 1e-6
ROPE_THETA = 10000.0
MAX_POSITION = 4096
NUM_WAVES = 256


@dataclass(frozen=True)
class References:
    """Images to edit."""

    patches: Tensor  # [R, channels], concatenated
    grids: list[tuple[int, int]]  # rows and columns of each


@dataclass(frozen=True)
class _Places:
    """Lengths of a stream's sequences, and their rope."""

    lengths: list[int]
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class _Rows:
    """Rows that blocks update."""

    x_TD: Tensor
    places: _Places


class QwenImageStream:
    """One stream's part of a block: norms modulated by the timestep, its heads of the joint attention, and its MLP."""

    def __init__(self, name: str, prefix: str, config: QwenImageConfig) -> None:
        self.head_width = config.head_width
        width = config.width
        own = partition.current()
        heads = own.heads("attention", config.num_heads, None, config.head_width)
        self.num_heads = heads.num_queries
        rows = heads.queries.times(config.head_width)
        qkv, output, norm = _ATTENTION_NAMES[prefix]
        self.modulation = GatheredLinear.named(f"{name}.{prefix}_mod.1", 6 * width, width, what="modulation", bias=True)
        self.qkv = Linear([(f"{name}.attn.{part}", width, rows) for part in qkv], width, bias=True)
        self.norm_q = Unpacked(f"{name}.attn.{norm}_q.weight", config.head_width)
        self.norm_k = Unpacked(f"{name}.attn.{norm}_k.weight", config.head_width)
        self.output = Linear([(f"{name}.attn.{output}", width)], width, column_shard=rows, bias=True)
        inner = own.width("MLP width", 4 * width)
        self.mlp_in = Linear([(f"{name}.{prefix}_mlp.net.0.proj", 4 * width, inner)], width, bias=True)
        self.mlp_out = Linear([(f"{name}.{prefix}_mlp.net.2", width)], 4 * width, column_shard=inner, bias=True)

    def modulated(self, embedded: Tensor) -> list[Sequence[Tensor]]:
        """Return for each timestep shift, scale and gate [1, D] of the attention, then those of the MLP."""
        return [one.chunk(6, dim=1) for one in self.modulation(embedded).split(1)]

    def heads(self, x_TD: Tensor, modulation: Sequence[Tensor], places: _Places) -> Tensor:
        """Return q, k and v [T, 3 x heads, K] of the stream's rows, normed and rotated."""
        shift, scale = modulation[:2]
        normed = ada_layer_norm(x_TD[None], scale, shift, EPS)[0]
        qkv = self.qkv(normed).unflatten(1, (3 * self.num_heads, -1))
        q, k, _ = qkv.split(self.num_heads, dim=1)
        qk_norm_rope(q, k, self.norm_q.value, self.norm_k.value, EPS, places.cos, places.sin, interleaved=True)
        return qkv

    def finish(self, x_TD: Tensor, attended: Tensor, modulation: Sequence[Tensor]) -> None:
        """Compute x + gate * attention output, then x + gate * mlp(norm(x)), updating x."""
        _, _, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        x_1TD, projected = x_TD[None], self.output(attended)[None]
        normed = ada_layer_norm(projected, mlp_scale, mlp_shift, EPS, residual=x_1TD, gate=gate)
        inner = self.mlp_in(normed, activation="gelu_tanh")
        gated_add(x_1TD, self.mlp_out(inner), mlp_gate, out=x_1TD)


# By stream: q, k and v, the projection back, and the norms of q and k.
_ATTENTION_NAMES = {
    "img": (("to_q", "to_k", "to_v"), "to_out.0", "norm"),
    "txt": (("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "norm_added"),
}


class QwenImageBlock:
    """Joint attention of text and images, then an MLP of each stream, updating both."""

    def __init__(self, name: str, config: QwenImageConfig) -> None:
        self.image = QwenImageStream(name, "img", config)
        self.text = QwenImageStream(name, "txt", config)

    def __call__(self, text: _Rows, images: Sequence[_Rows], embedded: Tensor) -> None:
        """Update the rows; `images` are generated and edited images, `embedded` the timesteps of both, or one."""
        parts = [(self.text, text, self.text.modulated(embedded[:1])[0])]
        of_images = self.image.modulated(embedded)
        parts += [(self.image, rows, of_images[min(i, len(embedded) - 1)]) for i, rows in enumerate(images)]
        heads = [stream.heads(rows.x_TD, modulation, rows.places) for stream, rows, modulation in parts]
        # A sequence is a text and its images. A stream has one product for all of them: the copy costs a hundredth of
        # a product.
        all_lengths = [rows.places.lengths for _, rows, _ in parts]
        split = [of_part.split(lengths) for of_part, lengths in zip(heads, all_lengths, strict=True)]
        joint = torch.cat([one for sequence in zip(*split, strict=True) for one in sequence])
        q, k, v = joint.chunk(3, dim=1)
        sequences = list(zip(*all_lengths, strict=True))
        attended = varlen_attention(q, k, v, starts_of(map(sum, sequences))).flatten(1)
        pieces = attended.split([length for sequence in sequences for length in sequence])
        for i, (stream, rows, modulation) in enumerate(parts):
            stream.finish(rows.x_TD, torch.cat(pieces[i :: len(parts)]), modulation)


class QwenImageTransformer:
    def __init__(self, config: QwenImageConfig) -> None:
        self.config = config
        width = config.width
        self.image_in = GatheredLinear.named("img_in", width, config.in_channels, what="patches", bias=True)
        self.text_norm = RmsNorm("txt_norm", config.text_width, EPS)
        self.text_in = GatheredLinear.named("txt_in", width, config.text_width, what="text embedding", bias=True)
        self.time_embedding = TimestepEmbedding("time_text_embed.timestep_embedder", NUM_WAVES, width)
        self.blocks = [QwenImageBlock(f"transformer_blocks.{i}", config) for i in range(config.num_layers)]
        self.modulation = GatheredLinear.named("norm_out.linear", 2 * width, width, what="modulation", bias=True)
        self.output = GatheredLinear.named("proj_out", config.patch_width, width, what="patches", bias=True)
        self.rope = AxialRope(config.rope_widths, ROPE_THETA)

    @staticmethod
    def checkpoint_name(name: str) -> str | None:
        return name

    @property
    def dtype(self) -> torch.dtype:
        return self.image_in.packed.dtype

    def __call__(
        self,
        patches: Tensor,
        timestep: float,
        texts: Sequence[Tensor],
        grid: tuple[int, int],
        cache: StepCache | None = None,
        references: References | None = None,
    ) -> Tensor:
        """Return the velocity [B, N, patch width], fp32, of patches [B, N, channels] of rows x columns each.

        `texts` [M, text width] has one for each image; the timestep is in thousandths of the whole way. `cache`
        carries results between steps, `references` are the images to edit, the same for the whole batch.
        """
        batch = len(patches)
        grids = [[grid], [] if references is None else references.grids]
        image_places, text_places = self._places([len(text) for text in texts], grids)
        image_TD = self.image_in(patches.to(self.dtype).flatten(0, 1))
        images, timesteps = [_Rows(image_TD, image_places[0])], [timestep]
        if references is not None:
            read_TD = self.image_in(references.patches.to(self.dtype)).repeat(batch, 1)
            images.append(_Rows(read_TD, image_places[1]))
            timesteps += [0.0] if self.config.has_still_references else []
        text_rows = torch.cat([text.to(patches.device, self.dtype) for text in texts])
        text = _Rows(self.text_in(self.text_norm(text_rows)), text_places)
        embedded = silu(self.time_embedding(torch.tensor(timesteps, device=patches.device)))

        def run(blocks: Sequence[QwenImageBlock]) -> None:
            for block in blocks:
                with scope():
                    block(text, images, embedded)

        # Nothing reads texts and references after the last block: only the generated image is cached.
        (cache or StepCache(0.0)).run(image_TD, lambda: run(self.blocks[:1]), lambda: run(self.blocks[1:]))
        scale, shift = self.modulation(embedded[:1]).chunk(2, dim=1)
        normed = ada_layer_norm(image_TD[None], scale, shift, EPS)[0]
        return self.output(normed, out_dtype=torch.float32).unflatten(0, (batch, -1))

    def _places(
        self, text_lengths: list[int], groups: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[list[_Places], _Places]:
        """Return the places of images, centred on the origin, and of texts, on the diagonal after the longest half.

        `groups` have rows and columns of the generated image, and of those to edit.
        """
        grids = [grid for group in groups for grid in group]
        first = max(side // 2 for grid in grids for side in grid)
        if (last := first + max(text_lengths)) > MAX_POSITION:
            rows, columns = max(grids)
            raise RequestError(
                f"a text of {max(text_lengths)} tokens beside {rows} x {columns} patches has positions up to {last}, "
                f"expected at most {MAX_POSITION}"
            )
        images, batch, number = [], len(text_lengths), 0
        for group in groups:
            places = [_centred(number + i, *grid) for i, grid in enumerate(group)]
            number += len(group)
            if places:
                of_one = torch.cat(places, dim=1)
                images.append(self._turned([of_one.shape[1]] * batch, of_one.repeat(1, batch)))
        on_diagonal = torch.cat([torch.arange(first, first + length) for length in text_lengths])
        return images, self._turned(text_lengths, on_diagonal.expand(3, -1))

    def _turned(self, lengths: list[int], positions: Tensor) -> _Places:
        return _Places(lengths, *self.rope.tables(positions.float().contiguous()))


def _centred(number: int, rows: int, columns: int) -> Tensor:
    """Return number, row and column of each patch of an image, fp32 [3, rows * columns]."""
    around = [torch.arange(size) - (size - size // 2) for size in (rows, columns)]
    grid = [axis.flatten() for axis in torch.meshgrid(*around, indexing="ij")]
    return torch.stack([torch.full((rows * columns,), float(number)), *grid])


def build(config: Mapping[str, Any]) -> QwenImageTransformer:
    return QwenImageTransformer(QwenImageConfig.from_dict(config))
