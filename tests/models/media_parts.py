"""Media as prompts take them, and what a processor wrote of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewright.types import Medium


def parts(images=(), videos=()) -> list[dict]:
    """Pictures and videos as a processor's `media`; a video may be {"video": frames, "fps": of the frames}."""
    given = [("image", item) for item in images] + [("video", item) for item in videos]
    return [{"type": kind, **item} if isinstance(item, Mapping) else {"type": kind, kind: item} for kind, item in given]


def patches_of(processor, medium: Medium) -> torch.Tensor:
    """What the encoder reads of a medium whose inputs are alive: a row per patch."""
    processor.media_buffer.load(medium.region)
    rows = processor.media_buffer.view(medium.region)
    return rows.view(-1, rows.shape[1] * (processor.video.temporal_patch_size if medium.kind == "video" else 1))
