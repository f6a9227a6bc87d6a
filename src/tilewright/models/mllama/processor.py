"""Messages or prompts with pictures to what Llama-3.2-Vision reads: ids, positions, and tiles that tokens attend to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.inputs.chat import ChatTemplate, normalize, opens_reasoning
from tilewright.inputs.media import Fetch, Limits, MediaKind, MediaPart, content_key
from tilewright.inputs.opener import InProcessOpener, Opener
from tilewright.inputs.processor import prompt_ids
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.mllama.preprocessing import Fit, fit, read_preprocessing
from tilewright.models.pixels import Pixels
from tilewright.ops import image as image_ops
from tilewright.types import Medium, Messages, ModelInputs, RequestError, Span

IsKnown = Callable[[bytes], bool]


class MllamaProcessor:
    """Turns requests into `ModelInputs`. May be called from several threads at once."""

    accepts: Sequence[MediaKind] = ("image",)

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: str | Path | None,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: Limits | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        opener: Opener | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.limits = limits or Limits()
        self.opener = opener or InProcessOpener()
        self.dtype = dtype
        self.settings = read_preprocessing(config, folder)
        self.image_token_id: int = config["image_token_index"]

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[object] | None = None,
        fetch: Fetch | None = None,
        is_known: IsKnown | None = None,
        **template_args: Any,
    ) -> ModelInputs:
        """The inputs of a conversation, up to where the model answers.

        `is_known` says of a picture's key that its states are at hand: it is then not decoded.
        """
        if self.template is None:
            raise RequestError("the model has no chat template: give it a prompt instead")
        normalized, parts = normalize(messages, limits=self.limits, fetch=fetch, accepts=self.accepts)
        text = self.template.render(normalized, tools=tools, **template_args)
        inputs = self._place(self.tokenizer.encode(text), parts, fetch, is_known)
        return dataclasses.replace(inputs, opens_reasoning=opens_reasoning(text))

    def prompt(
        self,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        images: Sequence[object] = (),
        videos: Sequence[object] = (),
        *,
        is_known: IsKnown | None = None,
    ) -> ModelInputs:
        """The inputs of a text, or of token ids, with one placeholder token per picture, in order.

        A text gets the tokenizer's beginning-of-text, behind the pictures it begins with, unless it has one.
        """
        if text is not None and token_ids is None:
            ids = self._begin(text)
        else:
            ids = prompt_ids(self.tokenizer, text, token_ids)
        content = [{"type": "image", "image": item} for item in images]
        content += [{"type": "video", "video": item} for item in videos]
        _, parts = normalize([{"role": "user", "content": content}], limits=self.limits, accepts=self.accepts)
        return self._place(ids, parts, None, is_known)

    def _begin(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        begin = self.tokenizer.bos_token_id
        if begin is None or begin in ids:
            return ids
        num_pictures = next((place for place, token_id in enumerate(ids) if token_id != self.image_token_id), len(ids))
        return [*ids[:num_pictures], begin, *ids[num_pictures:]]

    def _place(
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
