"""Messages or prompts with pictures to what Llama-3.2-Vision reads: ids, positions, and tiles that tokens attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart, content_key
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.inputs.media_processor import MediaProcessor, Placement, PreparedMedium
from tilewright.inputs.opener import Opener
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import ValueSizes
from tilewright.inputs.text_limits import TextBudget
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.mllama.preprocessing import Fit, fit, read_preprocessing
from tilewright.models.mllama.vision import arrangements
from tilewright.ops import image as image_ops
from tilewright.types import RequestError, Span

NUM_CHANNELS = 3


class MllamaProcessor(MediaProcessor):
    accepts = ("image",)

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: str | Path | None,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: MediaLimits | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        opener: Opener | None = None,
    ) -> None:
        self.settings = read_preprocessing(config, folder)
        buffer = MediaBuffer(NUM_CHANNELS * self.settings.patch_size**2, dtype)
        super().__init__(tokenizer, template, limits, opener, buffer)
        self.image_token_id: int = config["image_token_index"]
        self._state_width: int = config["text_config"]["hidden_size"]

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def _prompt_ids(
        self, text: str | None, token_ids: Sequence[int] | None, budget: TextBudget | None
    ) -> Sequence[int]:
        """A text gets the tokenizer's beginning-of-text, behind the pictures it begins with, unless it has one."""
        if text is None or token_ids is not None:
            return super()._prompt_ids(text, token_ids, budget)
        ids = self.tokenizer.encode(text, budget=budget)
        begin = self.tokenizer.bos_token_id
        if begin is None or begin in ids:
            return ids
        num_pictures = next((place for place, token_id in enumerate(ids) if token_id != self.image_token_id), len(ids))
        return [*ids[:num_pictures], begin, *ids[num_pictures:]]

    def _place(self, ids: Sequence[int], media: Sequence[PreparedMedium]) -> Placement:
        places = [place for place, token_id in enumerate(ids) if token_id == self.image_token_id]
        if len(places) > len(media):
            raise RequestError(
                f"the prompt has {len(places)} placeholders of images, expected {len(media)}: one for each image given"
            )
        if len(places) < len(media):
            raise RequestError(f"{media[len(places)].name}: the prompt has no placeholder left for it")
        positions = np.arange(len(ids), dtype=np.int64)[None]
        spans = [(Span(place, 1),) for place in places]
        return Placement(ids, positions, len(ids), list(zip(media, spans, strict=True)))

    def _prepare(self, part: MediaPart, fetch: Fetch | None) -> PreparedMedium:
        settings = self.settings
        picture = self.opener.open_picture(part, self.limits, fetch)
        fitted = fit(picture.height, picture.width, settings)
        num_tiles, side = fitted.tiling[0] * fitted.tiling[1], settings.patches_per_side

        def write(rows: Tensor) -> None:
            self._write_patches(self._canvas(torch.from_numpy(picture.decode()), fitted), rows)

        return PreparedMedium(
            part.name,
            "image",
            key=content_key(picture.digest, "tiles", fitted, settings),
            grid=(num_tiles, side, side),
            num_rows=num_tiles * side**2,
            encoder_rows=settings.max_tiles * side**2,  # tiles of padding cost the encoder as much
            write=write,
            num_states=num_tiles * (side**2 + 1),
            tiling=fitted.tiling,
        )

    def _value_sizes(self, given: Precomputed, name: str) -> ValueSizes:
        settings, side = self.settings, self.settings.patches_per_side
        if given.tiling not in arrangements(settings.max_tiles):
            raise RequestError(
                f"{name}: tiling is {given.tiling}, expected rows and columns of at most {settings.max_tiles} tiles"
            )
        num_tiles = given.tiling[0] * given.tiling[1]
        if given.grid != (num_tiles, side, side):
            raise RequestError(
                f"{name}: grid is {given.grid}, expected {(num_tiles, side, side)}: tiles, and rows and columns of "
                f"patches in each, for a tiling of {given.tiling}"
            )
        if given.times_s:
            raise RequestError(f"{name}: times_s has {len(given.times_s)} entries, expected 0")
        num_states = num_tiles * (side**2 + 1)
        return ValueSizes(
            num_rows=num_tiles * side**2,
            row_width=self.media_buffer.shape[1],
            num_features=num_states,
            feature_width=self._state_width,
            encoder_rows=settings.max_tiles * side**2,
            num_states=num_states,
        )

    def _canvas(self, pixels: Tensor, fitted: Fit) -> Tensor:
        """The picture in the upper left corner of its tiles, 8-bit RGB."""
        rows, columns = fitted.tiling
        size = self.settings.tile_size
        canvas = torch.zeros((rows * size, columns * size, NUM_CHANNELS), dtype=torch.uint8)
        resized = image_ops.resize(pixels, fitted.height, fitted.width, self.settings.filter)
        canvas[: fitted.height, : fitted.width] = resized
        return canvas

    def _write_patches(self, canvas: Tensor, rows: Tensor) -> None:
        """Patches [N, 3 * P * P], tile by tile and row by row within: a tile is one merged patch."""
        settings = self.settings
        image_ops.patches(
            canvas,
            *canvas.shape[:2],
            patch_size=settings.patch_size,
            merge_size=settings.patches_per_side,
            mean=settings.mean,
            std=settings.std,
            rescale=settings.rescale,
            filter=settings.filter,
            out=rows,
        )
