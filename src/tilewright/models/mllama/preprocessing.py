"""How a picture becomes tiles: the arrangement of tiles that suits it, its size within, and how pixels are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.model_files import CheckpointError, read_optional_json
from tilewright.models.mllama.vision import arrangements
from tilewright.ops.image import Filter

_FILTERS: dict[int, Filter] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# What the released checkpoints say; for folders without the file.
_DEFAULT_MEAN, _DEFAULT_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become tiles of patches. All of it is part of a picture's key."""

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
    """Where a picture goes: rows and columns of tiles, and its size in their upper left corner; the rest is black."""

    tiling: tuple[int, int]
    height: int
    width: int


def read_preprocessing(config: Mapping[str, Any], folder: str | Path | None) -> Preprocessing:
    """The settings of the folder's preprocessor_config.json, the vision config's and the released ones without it."""
    settings = _read_settings(Path(folder)) if folder is not None else {}
    vision = config["vision_config"]
    size = settings.get("size") or {"height": vision["image_size"], "width": vision["image_size"]}
    for name, given, expected in (
        ("size.height", size.get("height"), vision["image_size"]),
        ("size.width", size.get("width"), vision["image_size"]),
        ("max_image_tiles", settings.get("max_image_tiles", vision["max_num_tiles"]), vision["max_num_tiles"]),
    ):
        if given != expected:
            raise CheckpointError(f"picture preprocessing has {name} {given}, the vision config asks for {expected}")
    listed = [tuple(pair) for pair in vision.get("supported_aspect_ratios") or arrangements(vision["max_num_tiles"])]
    if listed != arrangements(vision["max_num_tiles"]):
        raise CheckpointError(
            f"vision_config has supported_aspect_ratios {listed}, expected all of up to max_num_tiles tiles"
        )
    for name in ("do_resize", "do_pad"):
        if not settings.get(name, True):
            raise CheckpointError(f"picture preprocessing has {name} false: a picture must fill whole tiles")
    resample = settings.get("resample", 2)
    if resample not in _FILTERS:
        raise CheckpointError(f"picture preprocessing has resample {resample}, expected 2 (bilinear) or 3 (bicubic)")
    normalize = settings.get("do_normalize", True)
    return Preprocessing(
        tile_size=vision["image_size"],
        patch_size=vision["patch_size"],
        max_tiles=vision["max_num_tiles"],
        mean=tuple(settings.get("image_mean") or _DEFAULT_MEAN) if normalize else (0.0, 0.0, 0.0),
        std=tuple(settings.get("image_std") or _DEFAULT_STD) if normalize else (1.0, 1.0, 1.0),
        rescale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        filter=_FILTERS[resample],
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """The first that is there: the section of processor_config.json, or the file of pictures."""
    for name, section in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        stored = read_optional_json(folder / name)
        if found := stored.get(section) if section else stored:
            return dict(found)
    return {}


def fit(height: int, width: int, settings: Preprocessing) -> Fit:
    """The tiles for a picture: the least that enlarge it to fill them, else those that shrink it least.

    Of several that scale it alike, those of the least area. It is not enlarged beyond what a side of one tile takes.
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
    """The size that keeps the picture's shape, with each side between a tile and the canvas where that is possible."""
    most_height = min(max(height, tile), canvas_height)
    most_width = min(max(width, tile), canvas_width)
    scale_height, scale_width = most_height / height, most_width / width
    if scale_width < scale_height:
        return min(max(1, math.floor(height * scale_width)), most_height), most_width
    return most_height, min(max(1, math.floor(width * scale_height)), most_width)
