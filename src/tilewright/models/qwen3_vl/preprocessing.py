"""Preprocessing of images and videos as a Qwen3-VL checkpoint describes it: sizes, sampling, timestamps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from tilewright.host.files import CheckpointError, read_optional_json
from tilewright.ops import media as image_ops
from tilewright.ops.media import Filter
from tilewright.types import RequestError

_FILTERS: dict[int, Filter] = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
_MAX_ASPECT_RATIO = 200

# The released checkpoints' values, for folders without the file.
_DEFAULT_SIZES = {
    "image": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "video": {"shortest_edge": 4_096, "longest_edge": 25_165_824},
}


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of pixels of one kind of media to patches. All of it is part of a medium's key."""

    min_pixels: int  # of an image, or of all frames of a video together
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    filter: Filter
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_tokens_per_frame: int | None = None  # None: no cap of its own

    @property
    def factor(self) -> int:
        """Pixels on a side of a merged patch; sizes are multiples of it."""
        return self.patch_size * self.merge_size

    def patches(self, pixels: Tensor, size: tuple[int, int], **options: Any) -> Tensor:
        """Return `ops.image.patches` of 8-bit RGB of any size, resized to the given height and width."""
        return image_ops.patches(
            pixels,
            *size,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            mean=self.mean,
            std=self.std,
            rescale=self.rescale,
            filter=self.filter,
            **options,
        )


def read_preprocessing(
    kind: Literal["image", "video"], config: Mapping[str, Any], folder: str | Path | None
) -> Preprocessing:
    """Read the folder's preprocessor files; missing entries are the vision config's, or the released ones.

    Without a folder the entries in the config itself are used, as GGUF files have them.
    """
    settings = _read_settings(kind, Path(folder)) if folder is not None else _given_settings(kind, config)
    vision = config["vision_config"]
    for name, ours in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if settings.setdefault(name, vision[ours]) != vision[ours]:
            raise CheckpointError(
                f"{kind} preprocessing has {name} {settings[name]}, config.json has {ours} {vision[ours]}"
            )
    if not settings.get("do_resize", True):
        raise CheckpointError(f"{kind} preprocessing has do_resize false: sides must be multiples of the merged patch")
    resample = settings.get("resample", 3)
    if resample not in _FILTERS:
        raise CheckpointError(f"{kind} preprocessing has resample {resample}, expected 2 (bilinear) or 3 (bicubic)")
    size = {**_DEFAULT_SIZES[kind], **(settings.get("size") or {})}
    normalize = settings.get("do_normalize", True)
    return Preprocessing(
        # The older keys win, as they do for the processors that read both.
        min_pixels=settings.get("min_pixels") or size["shortest_edge"],
        max_pixels=settings.get("max_pixels") or size["longest_edge"],
        patch_size=settings["patch_size"],
        merge_size=settings["merge_size"],
        temporal_patch_size=settings["temporal_patch_size"],
        mean=tuple(settings.get("image_mean") or (0.5, 0.5, 0.5)) if normalize else (0.0, 0.0, 0.0),
        std=tuple(settings.get("image_std") or (0.5, 0.5, 0.5)) if normalize else (1.0, 1.0, 1.0),
        rescale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        filter=_FILTERS[resample],
        fps=float(settings.get("fps") or 2.0),
        min_frames=settings.get("min_frames") or 4,
        max_frames=settings.get("max_frames") or 768,
        max_tokens_per_frame=settings.get("max_video_tokens", 768) if settings.get("cap_pixels_per_frame") else None,
    )


def _given_settings(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's entries for images; their sizes do not apply to videos, which count all frames."""
    given = config.get("preprocessor_config") or {}
    return {name: value for name, value in given.items() if kind == "image" or not name.endswith("_pixels")}


def _read_settings(kind: str, folder: Path) -> dict[str, Any]:
    """Return the first of: the section of processor_config.json, the kind's own file, the one for images."""
    section = read_optional_json(folder / "processor_config.json").get(f"{kind}_processor")
    if section:
        return dict(section)
    if kind == "video" and (settings := read_optional_json(folder / "video_preprocessor_config.json")):
        return settings
    return read_optional_json(folder / "preprocessor_config.json")


def image_size(height: int, width: int, settings: Preprocessing, name: str) -> tuple[int, int]:
    """Return the size an image is resized to: multiples of the merged patch, within the budget of pixels."""
    _check_aspect_ratio(height, width, name)
    return _fit(height, width, 1, 1, settings.factor, settings.min_pixels, settings.max_pixels)


def video_size(num_frames: int, height: int, width: int, settings: Preprocessing, name: str) -> tuple[int, int]:
    """Return the size of each of a video's frames; the budget is for all of them together."""
    factor, group = settings.factor, settings.temporal_patch_size
    num_frames = max(num_frames, group)  # a single frame is repeated to fill a group
    max_pixels = settings.max_pixels
    if settings.max_tokens_per_frame is not None:
        share = min(settings.max_tokens_per_frame * factor**2, settings.max_pixels // num_frames)
        max_pixels = max(share, int(settings.min_pixels * 1.05)) * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width, name)
    rounded_frames = round(num_frames / group) * group
    return _fit(height, width, num_frames, rounded_frames, factor, settings.min_pixels, max_pixels)


def _check_aspect_ratio(height: int, width: int, name: str) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > _MAX_ASPECT_RATIO:
        raise RequestError(f"{name}: {width} x {height} is an aspect ratio of {ratio:.0f}, at most {_MAX_ASPECT_RATIO}")


def _fit(
    height: int, width: int, num_frames: int, rounded_frames: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    fitted_height, fitted_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = rounded_frames * fitted_height * fitted_width
    if pixels > max_pixels:
        scale = math.sqrt(num_frames * height * width / max_pixels)
        fitted_height = max(factor, math.floor(height / scale / factor) * factor)
        fitted_width = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        fitted_height = math.ceil(height * scale / factor) * factor
        fitted_width = math.ceil(width * scale / factor) * factor
    return fitted_height, fitted_width


def num_sampled_frames(num_frames: int, fps: float, settings: Preprocessing) -> int:
    """Return how many of a video's frames are sampled."""
    wanted = int(num_frames / fps * settings.fps)
    return min(max(wanted, settings.min_frames), settings.max_frames, num_frames)


def sample_indices(num_frames: int, num_sampled: int) -> list[int]:
    """Return indices spread evenly from the first frame to the last."""
    return np.linspace(0, num_frames - 1, num_sampled).round().astype(int).tolist()


def group_times(times_s: Sequence[float], group: int) -> list[float]:
    """Return the time of each group of frames, midway between its first and last; the last frame pads its group."""
    padded = [*times_s, *[times_s[-1]] * (-len(times_s) % group)]
    return [(padded[start] + padded[start + group - 1]) / 2 for start in range(0, len(padded), group)]
