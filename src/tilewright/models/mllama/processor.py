"""Turns messages or prompts with images into Llama-3.2-Vision's inputs: ids, positions, and tiles.

An image becomes tiles: their arrangement, its size within them, and the scaling of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.host.files import CheckpointError, read_optional_json
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.isolation.opener import Opener
from tilewright.inputs.media import MediaLimits, MediaPart, content_key
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.inputs.messages import TextBudget
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import ValueSizes
from tilewright.inputs.processor import MediaProcessor, Placement, PreparedMedium
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.mllama.vision import arrangements
from tilewright.ops import media as image_ops
from tilewright.ops.media import Filter
from tilewright.types import RequestError, Span

_FILTERS: dict[int, Filter] = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
# The released checkpoints' values, for folders without the file.
_DEFAULT_MEAN, _DEFAULT_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class MllamaPreprocessing:
    """The conversion of pixels to tiles of patches. All of it is part of an image's key."""

    tile_size: int
    patch_size: int
    max_tiles: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    filter: Filter

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.patch_size


@dataclass(frozen=True)
class Fit:
    """An image's rows and columns of tiles, and its size in their upper left corner; the rest is black."""

    tiling: tuple[int, int]
    height: int
    width: int


def read_preprocessing(config: Mapping[str, Any], folder: str | Path | None) -> MllamaPreprocessing:
    """Read the folder's preprocessor_config.json; without it use the vision config's and the released settings."""
    settings = _read_settings(Path(folder)) if folder is not None else {}
    vision = config["vision_config"]
    size = settings.get("size") or {"height": vision["image_size"], "width": vision["image_size"]}
    for name, given, expected in (
        ("size.height", size.get("height"), vision["image_size"]),
        ("size.width", size.get("width"), vision["image_size"]),
        ("max_image_tiles", settings.get("max_image_tiles", vision["max_num_tiles"]), vision["max_num_tiles"]),
    ):
        if given != expected:
            raise CheckpointError(f"image preprocessing has {name} {given}, the vision config asks for {expected}")
    listed = [tuple(pair) for pair in vision.get("supported_aspect_ratios") or arrangements(vision["max_num_tiles"])]
    if listed != arrangements(vision["max_num_tiles"]):
        raise CheckpointError(
            f"vision_config has supported_aspect_ratios {listed}, expected all of up to max_num_tiles tiles"
        )
    for name in ("do_resize", "do_pad"):
        if not settings.get(name, True):
            raise CheckpointError(f"image preprocessing has {name} false: an image must fill whole tiles")
    resample = settings.get("resample", 2)
    if resample not in _FILTERS:
        raise CheckpointError(f"image preprocessing has resample {resample}, expected 2 (bilinear) or 3 (bicubic)")
    normalize = settings.get("do_normalize", True)
    return MllamaPreprocessing(
        tile_size=vision["image_size"],
        patch_size=vision["patch_size"],
        max_tiles=vision["max_num_tiles"],
        mean=tuple(settings.get("image_mean") or _DEFAULT_MEAN) if normalize else (0.0, 0.0, 0.0),
        std=tuple(settings.get("image_std") or _DEFAULT_STD) if normalize else (1.0, 1.0, 1.0),
        rescale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        filter=_FILTERS[resample],
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the image section of processor_config.json, else preprocessor_config.json."""
    for name, section in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        stored = read_optional_json(folder / name)
        if found := stored.get(section) if section else stored:
            return dict(found)
    return {}


def fit(height: int, width: int, settings: MllamaPreprocessing) -> Fit:
    """Choose an image's tiles: the least enlargement that fills them, else the least shrinking.

    Of several with the same scale, those of the least area. It is enlarged at most to the side of one tile.
    """
    tile = settings.tile_size

    def scale_of(tiling: tuple[int, int]) -> float:
        return min(tiling[0] * tile / height, tiling[1] * tile / width)

    candidates = arrangements(settings.max_tiles)
    scales = [scale_of(tiling) for tiling in candidates]
    enlarging = [scale for scale in scales if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales)
    tiling = min(
        (tiling for tiling, scale in zip(candidates, scales, strict=True) if scale == chosen),
        key=lambda tiling: tiling[0] * tiling[1],
    )
    return Fit(tiling, *_size_within(height, width, tiling[0] * tile, tiling[1] * tile, tile))


def _size_within(height: int, width: int, canvas_height: int, canvas_width: int, tile: int) -> tuple[int, int]:
    """Return the size with the image's aspect ratio, each side between a tile and the canvas if possible."""
    most_height = min(max(height, tile), canvas_height)
    most_width = min(max(width, tile), canvas_width)
    scale_height, scale_width = most_height / height, most_width / width
    if scale_width < scale_height:
        return min(max(1, math.floor(height * scale_width)), most_height), most_width
    return most_height, min(max(1, math.floor(width * scale_height)), most_width)


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
    def image_token_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def _prompt_ids(
        self, text: str | None, token_ids: Sequence[int] | None, budget: TextBudget | None
    ) -> Sequence[int]:
        """Add the beginning-of-text token to a text without one, after the images it begins with."""
        if text is None or token_ids is not None:
            return super()._prompt_ids(text, token_ids, budget)
        ids = self.tokenizer.encode(text, budget=budget)
        begin = self.tokenizer.bos_token_id
        if begin is None or begin in ids:
            return ids
        num_images = next((place for place, token_id in enumerate(ids) if token_id != self.image_token_id), len(ids))
        return [*ids[:num_images], begin, *ids[num_images:]]

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

    def _prepare(self, part: MediaPart) -> PreparedMedium:
        settings = self.settings
        image = self.opener.open_image(part, self.limits)
        fitted = fit(image.height, image.width, settings)
        num_tiles, side = fitted.tiling[0] * fitted.tiling[1], settings.patches_per_side

        def write(rows: Tensor) -> None:
            self._write_patches(self._canvas(torch.from_numpy(image.decode()), fitted), rows)

        return PreparedMedium(
            part.name,
            "image",
            key=content_key(image.digest, "tiles", fitted, settings),
            grid=(num_tiles, side, side),
            num_rows=num_tiles * side**2,
            encoder_rows=settings.max_tiles * side**2,  # padding tiles cost the encoder as much
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
        """Return the image in the upper left corner of its tiles, 8-bit RGB."""
        rows, columns = fitted.tiling
        size = self.settings.tile_size
        canvas = torch.zeros((rows * size, columns * size, NUM_CHANNELS), dtype=torch.uint8)
        resized = image_ops.resize(pixels, fitted.height, fitted.width, self.settings.filter)
        canvas[: fitted.height, : fitted.width] = resized
        return canvas

    def _write_patches(self, canvas: Tensor, rows: Tensor) -> None:
        """Write patches [N, 3 * P * P], tile by tile and row by row within: a tile is one merged patch."""
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
