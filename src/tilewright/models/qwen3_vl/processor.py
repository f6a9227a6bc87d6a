"""Turns messages or prompts with images and videos into Qwen3-VL's inputs: ids, three axes of positions, patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.isolation.opener import Opener
from tilewright.inputs.media import MediaLimits, MediaPart, check_duration, content_key
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import ValueSizes
from tilewright.inputs.processor import MediaProcessor, Placement, PreparedMedium
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.inputs.video import OpenedVideo, SampledFrames
from tilewright.models.qwen3_vl.preprocessing import (
    Preprocessing,
    group_times,
    image_size,
    num_sampled_frames,
    read_preprocessing,
    sample_indices,
    video_size,
)
from tilewright.models.qwen3_vl.vision import VisionConfig
from tilewright.ops import media as image_ops
from tilewright.types import MediaKind, RequestError, Span

_Run = tuple[MediaKind, int, int]  # kind, start, length


@dataclass(frozen=True)
class Placeholders:
    """Ids of the tokens that stand for media, and of those around each image and each group of frames."""

    of_kind: Mapping[MediaKind, int]
    start: int
    end: int


def place(
    ids: Sequence[int],
    media: Sequence[PreparedMedium],
    placeholders: Placeholders,
    merge_size: int,
    encode: Callable[[str], list[int]],
) -> Placement:
    """Return the prompt with every medium in place of its placeholders, in order.

    A medium without times has one placeholder, or as many as it has features. One with times (a video) has one, which
    becomes a time, a start, the features and an end for each group of frames; or each group already has its run of
    placeholders.
    """
    runs = _runs(ids, placeholders.of_kind)
    waiting = {kind: _Waiting(kind, media, runs) for kind in placeholders.of_kind}
    prompt = _Prompt(merge_size)
    position = 0
    for kind, start, length in runs:
        medium, is_expanded = waiting[kind].pop(), waiting[kind].is_expanded
        token_id = placeholders.of_kind[kind]
        prompt.add_text(ids[position:start])
        position = start + length
        if not medium.times_s or is_expanded:
            allowed = {prompt.group_length(medium)} | (set() if medium.times_s else {1})
            _check_run(medium, start, length, allowed)
            prompt.add_group(token_id, medium)
            continue
        _check_run(medium, start, length, {1})
        for time_s in medium.times_s:
            prompt.add_text([*encode(f"<{time_s:.1f} seconds>"), placeholders.start])
            prompt.add_group(token_id, medium)
            prompt.add_text([placeholders.end])
    prompt.add_text(ids[position:])
    for queue in waiting.values():
        if queue.media:
            raise RequestError(f"{queue.media[0].name}: the prompt has no placeholder left for it")
    return prompt.build()


class _Waiting:
    """Media of one kind that are not placed yet; one with times comes once per group if groups have runs."""

    def __init__(self, kind: MediaKind, media: Sequence[PreparedMedium], runs: Sequence[_Run]) -> None:
        self.kind = kind
        given = [medium for medium in media if medium.kind == kind]
        self.num_given = len(given)
        self.is_expanded = sum(other == kind for other, _, _ in runs) != len(given)
        self.media = [medium for medium in given for _ in (medium.times_s if self.is_expanded else ()) or (0,)]

    def pop(self) -> PreparedMedium:
        if not self.media:
            raise RequestError(
                f"the prompt has more placeholders of {self.kind}s than the {self.num_given} given have use for"
            )
        return self.media.pop(0)


def _check_run(medium: PreparedMedium, start: int, length: int, allowed: set[int]) -> None:
    if length not in allowed:
        expected = " or ".join(str(count) for count in sorted(allowed))
        raise RequestError(f"{medium.name}: {length} placeholders from token {start} on, expected {expected}")


class _Prompt:
    """Token ids and positions, appended from left to right.

    Text counts up on all three axes. A group of patches stays at one time and runs over its rows and columns; text
    continues after the longer of the two.
    """

    def __init__(self, merge_size: int) -> None:
        self._merge_size = merge_size
        self._ids: list[int] = []
        self._positions: list[np.ndarray] = []
        self._next_position = 0
        self._spans: dict[int, tuple[PreparedMedium, list[Span]]] = {}  # by identity: an image may occur twice

    def add_text(self, ids: Sequence[int]) -> None:
        self._ids += ids
        positions = np.arange(len(ids), dtype=np.int64) + self._next_position
        self._positions.append(np.broadcast_to(positions, (3, len(ids))))
        self._next_position += len(ids)

    def group_length(self, medium: PreparedMedium) -> int:
        """Return the number of features of an image, or of a group of a video's frames."""
        return medium.grid[1] * medium.grid[2] // self._merge_size**2

    def add_group(self, token_id: int, medium: PreparedMedium) -> None:
        rows, columns = (side // self._merge_size for side in medium.grid[1:])
        span = Span(len(self._ids), rows * columns)
        self._spans.setdefault(id(medium), (medium, []))[1].append(span)
        self._ids += [token_id] * span.length
        self._positions.append(np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1) + self._next_position)
        self._next_position += max(rows, columns)

    def build(self) -> Placement:
        media = [(medium, tuple(spans)) for medium, spans in self._spans.values()]
        return Placement(self._ids, np.concatenate(self._positions, axis=1), self._next_position, media)


def _runs(ids: Sequence[int], of_kind: Mapping[MediaKind, int]) -> list[_Run]:
    """Return every run of equal placeholders."""
    kinds = {token_id: kind for kind, token_id in of_kind.items()}
    found: list[_Run] = []
    for index, token_id in enumerate(ids):
        kind = kinds.get(token_id)
        if kind is None:
            continue
        if found and found[-1][0] == kind and sum(found[-1][1:]) == index:
            found[-1] = (kind, found[-1][1], found[-1][2] + 1)
        else:
            found.append((kind, index, 1))
    return found


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
        # A row is a patch of an image; a patch of a video takes as many rows as a group has frames.
        buffer = MediaBuffer(NUM_CHANNELS * self.image.patch_size**2, dtype)
        super().__init__(tokenizer, template, limits, opener, buffer)
        self.placeholders = Placeholders(
            of_kind={"image": config["image_token_id"], "video": config["video_token_id"]},
            start=config["vision_start_token_id"],
            end=config["vision_end_token_id"],
        )

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        return self.placeholders.start, self.placeholders.of_kind["image"], self.placeholders.end

    def _place(self, ids: Sequence[int], media: Sequence[PreparedMedium]) -> Placement:
        """Place the media; a placeholder may already be expanded to as many tokens as its medium has features."""
        return place(ids, media, self.placeholders, self.image.merge_size, self.tokenizer.encode)

    def _prepare(self, part: MediaPart) -> PreparedMedium:
        return self._prepare_image(part) if part.kind == "image" else self._prepare_video(part)

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
        """Raise RequestError for tiles, and for groups of frames without their times, or times without frames."""
        if given.tiling != (1, 1):
            raise RequestError(f"{name}: tiling is {given.tiling}, and this model does not tile images")
        if given.kind == "image" and given.grid[0] != 1:
            raise RequestError(f"{name}: grid is {given.grid}, expected 1 frame")
        num_groups = given.grid[0] if given.kind == "video" else 0
        if len(given.times_s) != num_groups:
            raise RequestError(f"{name}: times_s has {len(given.times_s)} entries, expected {num_groups}")
        if given.times_s:
            check_duration(given.times_s[-1], name, self.limits)

    def _prepare_image(self, part: MediaPart) -> PreparedMedium:
        settings = self.image
        image = self.opener.open_image(part, self.limits)
        height, width = image_size(image.height, image.width, settings, part.name)
        grid = (1, height // settings.patch_size, width // settings.patch_size)

        def write(rows: Tensor) -> None:
            _write_patches(torch.from_numpy(image.decode()), (height, width), 1, settings, rows)

        return PreparedMedium(
            part.name,
            "image",
            key=content_key(image.digest, "image", height, width, settings),
            grid=grid,
            num_rows=math.prod(grid),
            encoder_rows=math.prod(grid),
            write=write,
        )

    def _prepare_video(self, part: MediaPart) -> PreparedMedium:
        settings = self.video
        video = self.opener.open_video(part, self.limits)
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
            # Group by group: a video's frames never lie in memory beside its patches.
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

    def _frame_indices(self, video: OpenedVideo) -> Sequence[int]:
        """Return the frames of a video that are read."""
        num_sampled = num_sampled_frames(video.num_frames, video.fps, self.video)
        return sample_indices(video.num_frames, num_sampled)

    def _frame_size(self, video: OpenedVideo, num_sampled: int) -> tuple[int, int]:
        """Return the height and width that frames are resized to."""
        return video_size(num_sampled, video.height, video.width, self.video, video.name)

    def _group_times(self, video: OpenedVideo, sampled: SampledFrames) -> Sequence[float]:
        """Return when each group of frames is shown."""
        return group_times(sampled.times_s, self.video.temporal_patch_size)


def _frame_groups(frames: Iterator[np.ndarray], size: tuple[int, int], settings: Preprocessing) -> Iterator[Tensor]:
    """Yield groups of resized frames [frames, height, width, 3]; the last frame pads its group.

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
    """Write the encoder's inputs [N, 3 * frames of a group * P * P] for 8-bit RGB of any size."""
    out = rows.view(-1, temporal_patch_size * rows.shape[1])
    settings.patches(pixels, size, temporal_patch_size=temporal_patch_size, out=out)
