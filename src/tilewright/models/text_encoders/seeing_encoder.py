"""Qwen2.5-VL as a text encoder that sees pictures: hidden states of a prompt with features in the place of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.layers.batch import UncachedBatch, starts_of
from tilewright.layers.decoder import DecoderConfig
from tilewright.models.text_config import integer
from tilewright.models.text_encoders.decoder_encoder import DecoderEncoder, text_side
from tilewright.models.text_encoders.windowed_vision import Grid, WindowedVisionConfig, WindowedVisionTower
from tilewright.types import UnsupportedConfig

MODEL_TYPES = ("qwen2_5_vl",)


class SeeingEncoder(DecoderEncoder):
    """A `DecoderEncoder` with the vision tower of its checkpoint."""

    def __init__(self, config: DecoderConfig, vision: WindowedVisionConfig, picture_token: int) -> None:
        super().__init__(config)
        self.vision = WindowedVisionTower("visual", vision)
        self.picture_token = picture_token

    def checkpoint_name(self, name: str) -> str | None:
        inner = name.removeprefix("model.")
        return inner if inner.startswith("visual.") else super().checkpoint_name(name)

    def encode_seeing(self, token_ids: Sequence[int], patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The hidden states [L, D] of a prompt that has a picture's tokens in a row for each of the grids.

        `patches` [N, 3 P P] are those of all pictures.
        """
        merge = self.vision.config.merge_size
        sizes = [(rows // merge, columns // merge) for rows, columns in grids]
        x_TD = self._embedded([token_ids])
        is_picture = torch.tensor(token_ids, device=x_TD.device) == self.picture_token
        x_TD[is_picture] = self.vision(patches, grids).to(x_TD.dtype)
        positions = picture_positions(token_ids, self.picture_token, sizes)
        return self._states(x_TD, positions, UncachedBatch(starts_of([len(token_ids)])))


def picture_positions(token_ids: Sequence[int], picture_token: int, sizes: Sequence[Grid]) -> Tensor:
    """Time, row and column of each token, int64 [3, L]. A picture's begin where text stands, and text goes on behind.

    `sizes` are rows and columns of each picture's features, whose tokens stand in the prompt in a row.
    """
    parts: list[Tensor] = []
    at, next_position, left = 0, 0, list(sizes)
    while at < len(token_ids):
        if token_ids[at] != picture_token:
            parts.append(torch.full((3, 1), next_position))
            at, next_position = at + 1, next_position + 1
            continue
        rows, columns = left.pop(0)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        place = torch.stack([torch.zeros_like(row), row, column]).flatten(1)
        parts.append(next_position + place)
        at, next_position = at + rows * columns, next_position + max(rows, columns)
    return torch.cat(parts, dim=1)


def build(config: Mapping[str, Any]) -> SeeingEncoder:
    """The encoder that a text encoder's config.json describes, with its vision tower."""
    vision = config.get("vision_config")
    if config.get("model_type") not in MODEL_TYPES or not isinstance(vision, Mapping):
        raise UnsupportedConfig(
            f"model_type is {config.get('model_type')!r}, expected {' or '.join(MODEL_TYPES)} with a vision_config"
        )
    tower, text = WindowedVisionConfig.from_dict(vision), text_side(config)
    if tower.output_width != text.width:
        raise UnsupportedConfig(f"vision_config has out_hidden_size {tower.output_width}, expected {text.width}")
    return SeeingEncoder(text, tower, integer(config, "image_token_id", 151655))
