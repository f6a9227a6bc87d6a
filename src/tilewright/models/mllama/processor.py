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
from tilewright.inputs.media_processor import IsKnown, MediaProcessor
from tilewright.inputs.opener import Opener
from tilewright.inputs.text_limits import TextBudget
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.mllama.preprocessing import Fit, fit, read_preprocessing
from tilewright.models.pixels import Pixels
from tilewright.ops import image as image_ops
from tilewright.types import Medium, ModelInputs, RequestError, Span


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
        super().__init__(tokenizer, template, limits, dtype, opener)
        self.settings = read_preprocessing(config, folder)
        self.image_token_id: int = config["image_token_index"]

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

    def _inputs(
        self, ids: Sequence[int], parts: Sequence[MediaPart], fetch: Fetch | None, is_known: IsKnown | None
    ) -> ModelInputs:
        places = [place for place, token_id in enumerate(ids) if token_id == self.image_token_id]
        if len(places) > len(parts):
            raise RequestError(
                f"the prompt has {len(places)} placeholders of images, expected {len(parts)}: one for each image given"
            )
        if len(places) < len(parts):
            raise RequestError(f"{parts[len(places)].name}: the prompt has no placeholder left for it")
        media = tuple(self._prepare(part, place, fetch, is_known) for part, place in zip(parts, places, strict=True))
        return ModelInputs(tuple(ids), np.arange(len(ids), dtype=np.int64)[None], len(ids), media)

    def _prepare(self, part: MediaPart, place: int, fetch: Fetch | None, is_known: IsKnown | None) -> Medium:
        settings = self.settings
        picture = self.opener.open_picture(part, self.limits, fetch)
        fitted = fit(picture.height, picture.width, settings)
        key = content_key(picture.digest, "tiles", fitted, settings)
        pixels = Pixels(lambda: self._canvas(torch.from_numpy(picture.decode()), fitted))
        if is_known is None or not is_known(key):
            pixels()
        side = settings.patches_per_side
        return Medium(
            kind="image",
            key=key,
            grid=(settings.max_tiles, side, side),  # tiles of padding cost the encoder as much
            spans=(Span(place, 1),),
            load=lambda: self._patches(pixels()),
            num_states=fitted.tiling[0] * fitted.tiling[1] * (side**2 + 1),
            tiling=fitted.tiling,
        )

    def _canvas(self, pixels: Tensor, fitted: Fit) -> Tensor:
        """The picture in the upper left corner of its tiles, 8-bit RGB."""
        rows, columns = fitted.tiling
        size = self.settings.tile_size
        canvas = torch.zeros((rows * size, columns * size, 3), dtype=torch.uint8)
        resized = image_ops.resize(pixels, fitted.height, fitted.width, self.settings.filter)
        canvas[: fitted.height, : fitted.width] = resized
        return canvas

    def _patches(self, canvas: Tensor) -> Tensor:
        """Patches [N, 3 * P * P], tile by tile and row by row within: a tile is one merged patch."""
        settings = self.settings
        return image_ops.patches(
            canvas,
            *canvas.shape[:2],
            patch_size=settings.patch_size,
            merge_size=settings.patches_per_side,
            mean=settings.mean,
            std=settings.std,
            rescale=settings.rescale,
            filter=settings.filter,
            dtype=self.dtype,
        )
