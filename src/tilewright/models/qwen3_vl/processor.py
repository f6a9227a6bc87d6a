"""Messages or prompts with pictures and videos to what Qwen3-VL reads: ids, three axes of positions, patches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart, check_duration, content_key
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.inputs.media_processor import MediaProcessor, Placement, PreparedMedium
from tilewright.inputs.opener import Opener
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import ValueSizes
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.inputs.video import Sampled, Video
from tilewright.models.qwen3_vl.preprocessing import (
    Preprocessing,
    group_times,
    num_sampled_frames,
    picture_size,
    read_preprocessing,
    sample_indices,
    video_size,
)
from tilewright.models.qwen3_vl.prompt import Placeholders, place
from tilewright.models.qwen3_vl.vision import VisionConfig
from tilewright.ops import image as image_ops
from tilewright.types import MediaKind, RequestError

NUM_CHANNELS = 3


class Qwen3VlProcessor(MediaProcessor):
    accepts: Sequence[MediaKind] = ("image", "video")

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
        vision = VisionConfig.from_dict(config["vision_config"])
        self._feature_width = vision.num_outputs * vision.output_width
        self.image = read_preprocessing("image", config, folder)
        self.video = read_preprocessing("video", config, folder)
        # A row is a patch of a picture; one of a video has as many rows as a group has frames.
        buffer = MediaBuffer(NUM_CHANNELS * self.image.patch_size**2, dtype)
        super().__init__(tokenizer, template, limits, opener, buffer)
        self.placeholders = Placeholders(
            of_kind={"image": config["image_token_id"], "video": config["video_token_id"]},
            start=config["vision_start_token_id"],
            end=config["vision_end_token_id"],
        )

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        return self.placeholders.start, self.placeholders.of_kind["image"], self.placeholders.end

    def _place(self, ids: Sequence[int], media: Sequence[PreparedMedium]) -> Placement:
        """A placeholder may also be expanded already, to exactly as many tokens as its medium has features."""
        return place(ids, media, self.placeholders, self.image.merge_size, self.tokenizer.encode)

    def _prepare(self, part: MediaPart, fetch: Fetch | None) -> PreparedMedium:
        return self._prepare_picture(part, fetch) if part.kind == "image" else self._prepare_video(part, fetch)

    def _value_sizes(self, given: Precomputed, name: str) -> ValueSizes:
        self._check_given(given, name)
        settings = self.image if given.kind == "image" else self.video
        groups, rows, columns = grid = given.grid
        if rows % settings.merge_size or columns % settings.merge_size:
            raise RequestError(f"{name}: grid is {grid}, expected rows and columns that {settings.merge_size} divides")
        pixels = rows * columns * settings.patch_size**2
        if pixels > self.limits.max_pixels:
            raise RequestError(
                f"{name}: grid is {grid}, {pixels} pixels, the limit is {self.limits.max_pixels} (--max-pixels)"
            )
        frames = 1 if given.kind == "image" else settings.temporal_patch_size
        if groups * frames > self.limits.max_frames:
            raise RequestError(
                f"{name}: grid is {grid}, {groups * frames} frames, the limit is {self.limits.max_frames} "
                "(--max-frames)"
            )
        num_patches = math.prod(grid)
        return ValueSizes(
            num_rows=num_patches,
            row_width=frames * self.media_buffer.shape[1],
            num_features=num_patches // settings.merge_size**2,
            feature_width=self._feature_width,
            encoder_rows=num_patches,
        )

    def _check_given(self, given: Precomputed, name: str) -> None:
        """RequestError for tiles, and for groups of frames without their times, or times without frames."""
        if given.tiling != (1, 1):
            raise RequestError(f"{name}: tiling is {given.tiling}, and this model cuts no picture into tiles")
        if given.kind == "image" and given.grid[0] != 1:
            raise RequestError(f"{name}: grid is {given.grid}, expected 1 frame")
        num_groups = given.grid[0] if given.kind == "video" else 0
        if len(given.times_s) != num_groups:
            raise RequestError(f"{name}: times_s has {len(given.times_s)} entries, expected {num_groups}")
        if given.times_s:
            check_duration(given.times_s[-1], name, self.limits)

    def _prepare_picture(self, part: MediaPart, fetch: Fetch | None) -> PreparedMedium:
        settings = self.image
        picture = self.opener.open_picture(part, self.limits, fetch)
        height, width = picture_size(picture.height, picture.width, settings, part.name)
        grid = (1, height // settings.patch_size, width // settings.patch_size)

        def write(rows: Tensor) -> None:
            _write_patches(torch.from_numpy(picture.decode()), (height, width), 1, settings, rows)

        return PreparedMedium(
            part.name,
            "image",
            key=content_key(picture.digest, "image", height, width, settings),
            grid=grid,
            num_rows=math.prod(grid),
            encoder_rows=math.prod(grid),
            write=write,
        )

    def _prepare_video(self, part: MediaPart, fetch: Fetch | None) -> PreparedMedium:
        settings = self.video
        video = self.opener.open_video(part, self.limits, fetch)
        indices = self._frame_indices(video)
        if len(indices) > self.limits.max_frames:
            raise RequestError(
                f"{part.name}: {len(indices)} frames, the limit is {self.limits.max_frames} (--max-frames)"
            )
        sampled = video.sample(indices)
        height, width = self._frame_size(video, len(indices))
        group = settings.temporal_patch_size
        times_s = self._group_times(video, sampled)
        grid = (len(times_s), height // settings.patch_size, width // settings.patch_size)

        def write(rows: Tensor) -> None:
            groups = _frame_groups(video.frames(sampled.indices), (height, width), settings)
            # Group by group: a film's frames never lie in memory beside its patches.
            for frames, part_of_rows in zip(groups, rows.split(len(rows) // len(times_s)), strict=True):
                _write_patches(frames, (height, width), group, settings, part_of_rows)

        return PreparedMedium(
            part.name,
            "video",
            key=content_key(video.digest, "video", height, width, sampled.indices, sampled.times_s, settings),
            grid=grid,
            num_rows=math.prod(grid) * group,
            encoder_rows=math.prod(grid),
            write=write,
            times_s=tuple(times_s),
        )

    def _frame_indices(self, video: Video) -> Sequence[int]:
        """The frames of a video that are read."""
        num_sampled = num_sampled_frames(video.num_frames, video.fps, self.video)
        return sample_indices(video.num_frames, num_sampled)

    def _frame_size(self, video: Video, num_sampled: int) -> tuple[int, int]:
        """The height and width that frames are resized to."""
        return video_size(num_sampled, video.height, video.width, self.video, video.name)

    def _group_times(self, video: Video, sampled: Sampled) -> Sequence[float]:
        """When each group of frames is shown."""
        return group_times(sampled.times_s, self.video.temporal_patch_size)


def _frame_groups(frames: Iterator[np.ndarray], size: tuple[int, int], settings: Preprocessing) -> Iterator[Tensor]:
    """Frames resized, as many as a group has [frames, height, width, 3]; the last frame fills up its group.

    Each group is overwritten by the next one.
    """
    group = torch.empty((settings.temporal_patch_size, *size, NUM_CHANNELS), dtype=torch.uint8)
    place = 0
    for frame in frames:
        image_ops.resize(torch.from_numpy(frame), *size, settings.filter, out=group[place])
        place += 1
        if place == len(group):
            yield group
            place = 0
    if place:
        group[place:] = group[place - 1]
        yield group


def _write_patches(
    pixels: Tensor, size: tuple[int, int], temporal_patch_size: int, settings: Preprocessing, rows: Tensor
) -> None:
    """What the encoder reads [N, 3 * frames of a group * P * P], of 8-bit RGB of any size."""
    out = rows.view(-1, temporal_patch_size * rows.shape[1])
    settings.patches(pixels, size, temporal_patch_size=temporal_patch_size, out=out)
