"""Messages or prompts with pictures and videos to what Qwen3-VL reads: ids, three axes of positions, patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.inputs.chat import ChatTemplate, normalize, opens_reasoning
from tilewright.inputs.media import Fetch, Limits, MediaKind, MediaPart, content_key
from tilewright.inputs.opener import InProcessOpener, Opener
from tilewright.inputs.processor import prompt_ids
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.models.qwen3_vl.preprocessing import (
    group_times,
    num_sampled_frames,
    picture_size,
    read_preprocessing,
    sample_indices,
    video_size,
)
from tilewright.models.qwen3_vl.prompt import Patches, Placeholders, Prepared, place
from tilewright.ops import image as image_ops
from tilewright.types import Messages, ModelInputs, RequestError

IsKnown = Callable[[bytes], bool]


class Qwen3VlProcessor:
    """Turns requests into `ModelInputs`. May be called from several threads at once."""

    accepts: Sequence[MediaKind] = ("image", "video")

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

        `is_known` says of a medium's key that its features are at hand: it is then not decoded.
        """
        if self.template is None:
            raise RequestError("the model has no chat template: give it a prompt instead")
        normalized, parts = normalize(messages, limits=self.limits, fetch=fetch, accepts=self.accepts)
        text = self.template.render(normalized, tools=tools, **template_args)
        media = [self._prepare(part, fetch, is_known) for part in parts]
        inputs = self._place(self.tokenizer.encode(text), media)
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
        """The inputs of a text, or of token ids, with one placeholder token per picture and video, in order.

        A placeholder in `token_ids` may also be expanded already, to exactly as many tokens as its medium has features.
        A video is a file, frames, or {"video": frames, "fps": of the frames}.
        """
        ids = prompt_ids(self.tokenizer, text, token_ids)
        content = [_as_part("image", item) for item in images] + [_as_part("video", item) for item in videos]
        _, parts = normalize([{"role": "user", "content": content}], limits=self.limits, accepts=self.accepts)
        return self._place(ids, [self._prepare(part, None, is_known) for part in parts])

    def _place(self, ids: Sequence[int], media: Sequence[Prepared]) -> ModelInputs:
        return place(ids, media, self.placeholders, self.image.merge_size, self.tokenizer.encode)

    def _prepare(self, part: MediaPart, fetch: Fetch | None, is_known: IsKnown | None) -> Prepared:
        if part.kind == "image":
            return self._prepare_picture(part, fetch, is_known)
        return self._prepare_video(part, fetch, is_known)

    def _prepare_picture(self, part: MediaPart, fetch: Fetch | None, is_known: IsKnown | None) -> Prepared:
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
        return Prepared(part.name, "image", key, grid, (), patches.load)

    def _prepare_video(self, part: MediaPart, fetch: Fetch | None, is_known: IsKnown | None) -> Prepared:
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
        return Prepared(part.name, "video", key, grid, tuple(times_s), patches.load)


def _as_part(kind: MediaKind, item: object) -> dict[str, Any]:
    return {"type": kind, **item} if isinstance(item, Mapping) else {"type": kind, kind: item}
