"""Messages or prompts with pictures and videos to what Qwen3-VL reads: ids, three axes of positions, patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart, content_key
from tilewright.inputs.media_processor import IsKnown, MediaProcessor
from tilewright.inputs.opener import Opener
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.qwen3_vl.preprocessing import (
    group_times,
    num_sampled_frames,
    picture_size,
    read_preprocessing,
    sample_indices,
    video_size,
)
from tilewright.models.qwen3_vl.prompt import Patches, Placeholders, PreparedMedium, place
from tilewright.ops import image as image_ops
from tilewright.types import ModelInputs, RequestError


class Qwen3VlProcessor(MediaProcessor):
    accepts = ("image", "video")

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
        self.image = read_preprocessing("image", config, folder)
        self.video = read_preprocessing("video", config, folder)
        self.placeholders = Placeholders(
            image=config["image_token_id"],
            video=config["video_token_id"],
            start=config["vision_start_token_id"],
            end=config["vision_end_token_id"],
        )

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        return self.placeholders.start, self.placeholders.image, self.placeholders.end

    def _inputs(
        self, ids: Sequence[int], parts: Sequence[MediaPart], fetch: Fetch | None, is_known: IsKnown | None
    ) -> ModelInputs:
        """A placeholder may also be expanded already, to exactly as many tokens as its medium has features."""
        media = [self._prepare(part, fetch, is_known) for part in parts]
        return place(ids, media, self.placeholders, self.image.merge_size, self.tokenizer.encode)

    def _prepare(self, part: MediaPart, fetch: Fetch | None, is_known: IsKnown | None) -> PreparedMedium:
        if part.kind == "image":
            return self._prepare_picture(part, fetch, is_known)
        return self._prepare_video(part, fetch, is_known)

    def _prepare_picture(self, part: MediaPart, fetch: Fetch | None, is_known: IsKnown | None) -> PreparedMedium:
        settings = self.image
        picture = self.opener.open_picture(part, self.limits, fetch)
        height, width = picture_size(picture.height, picture.width, settings, part.name)
        key = content_key(picture.digest, "image", height, width, settings)

        def decode() -> Tensor:
            pixels = torch.from_numpy(picture.decode())
            # Held until the encoder takes them: whichever is smaller.
            if picture.height * picture.width > height * width:
                pixels = image_ops.resize(pixels, height, width, settings.filter)
            return pixels

        patches = Patches(decode, (height, width), 1, settings, self.dtype)
        if is_known is None or not is_known(key):
            patches.decode()
        grid = (1, height // settings.patch_size, width // settings.patch_size)
        return PreparedMedium(part.name, "image", key, grid, (), patches.load)

    def _prepare_video(self, part: MediaPart, fetch: Fetch | None, is_known: IsKnown | None) -> PreparedMedium:
        settings = self.video
        video = self.opener.open_video(part, self.limits, fetch)
        num_sampled = num_sampled_frames(video.num_frames, video.fps, settings)
        if num_sampled > self.limits.max_frames:
            raise RequestError(f"{part.name}: {num_sampled} frames, the limit is {self.limits.max_frames}")
        sampled = video.sample(sample_indices(video.num_frames, num_sampled))
        height, width = video_size(num_sampled, video.height, video.width, settings, part.name)
        key = content_key(video.digest, "video", height, width, sampled.indices, sampled.times_s, settings)

        def decode() -> Tensor:
            group = settings.temporal_patch_size
            frames = torch.empty((-(-num_sampled // group) * group, height, width, 3), dtype=torch.uint8)
            for index, frame in enumerate(video.frames(sampled.indices)):
                image_ops.resize(torch.from_numpy(frame), height, width, settings.filter, out=frames[index])
            frames[num_sampled:] = frames[num_sampled - 1]
            return frames

        patches = Patches(decode, (height, width), settings.temporal_patch_size, settings, self.dtype)
        if is_known is None or not is_known(key):
            patches.decode()
        times_s = group_times(sampled.times_s, settings.temporal_patch_size)
        grid = (len(times_s), height // settings.patch_size, width // settings.patch_size)
        return PreparedMedium(part.name, "video", key, grid, tuple(times_s), patches.load)
