"""Media in their places: placeholders expanded, positions on three axes, patches made when the encoder asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tilewright.models.pixels import Pixels
from tilewright.models.qwen3_vl.preprocessing import Preprocessing
from tilewright.ops import image as image_ops
from tilewright.types import Medium, ModelInputs, RequestError, Span


@dataclass(frozen=True)
class Placeholders:
    """Ids of the tokens that stand for media, and of those around each picture and each group of frames."""

    image: int
    video: int
    start: int
    end: int


@dataclass(frozen=True)
class PreparedMedium:
    """A medium with its size and key, before it has a place in a prompt."""

    name: str  # for errors: "image 2"
    kind: Literal["image", "video"]
    key: bytes
    grid: tuple[int, int, int]
    times_s: tuple[float, ...]  # of each group of frames; none for a picture
    load: Callable[[], Tensor]


class Patches:
    """The patches of one medium; its pixels are decoded once, when first asked for."""

    def __init__(
        self,
        read: Callable[[], Tensor],
        size: tuple[int, int],
        temporal_patch_size: int,
        settings: Preprocessing,
        dtype: torch.dtype,
    ) -> None:
        self._pixels = Pixels(read)
        self._size = size
        self._temporal_patch_size = temporal_patch_size
        self._settings = settings
        self._dtype = dtype

    def decode(self) -> Tensor:
        """The pixels, 8-bit RGB."""
        return self._pixels()

    def load(self) -> Tensor:
        """What the encoder reads: [N, 3 * frames of a group * P * P]."""
        settings = self._settings
        return image_ops.patches(
            self.decode(),
            *self._size,
            patch_size=settings.patch_size,
            merge_size=settings.merge_size,
            mean=settings.mean,
            std=settings.std,
            rescale=settings.rescale,
            filter=settings.filter,
            temporal_patch_size=self._temporal_patch_size,
            dtype=self._dtype,
        )


def place(
    ids: Sequence[int],
    media: Sequence[PreparedMedium],
    placeholders: Placeholders,
    merge_size: int,
    encode: Callable[[str], list[int]],
) -> ModelInputs:
    """The prompt with every medium in the place of its placeholders, in order.

    A picture has one placeholder, or as many as it has features. A video has one, which becomes a time, a start, the
    features and an end for each group of frames; or each group has its run of placeholders already.
    """
    runs = _runs(ids, (placeholders.image, placeholders.video))
    videos = [medium for medium in media if medium.kind == "video"]
    is_expanded = sum(token_id == placeholders.video for token_id, _, _ in runs) != len(videos)
    waiting = {
        placeholders.image: [medium for medium in media if medium.kind == "image"],
        placeholders.video: [medium for medium in videos for _ in (medium.times_s if is_expanded else (0,))],
    }
    prompt = _Prompt(merge_size)
    position = 0
    for token_id, start, length in runs:
        kind = "image" if token_id == placeholders.image else "video"
        if not waiting[token_id]:
            given = sum(medium.kind == kind for medium in media)
            raise RequestError(f"the prompt has more placeholders of {kind}s than the {given} given have use for")
        medium = waiting[token_id].pop(0)
        prompt.add_text(ids[position:start])
        position = start + length
        if kind == "image" or is_expanded:
            allowed = {prompt.group_length(medium)} | ({1} if kind == "image" else set())
            _check_run(medium, start, length, allowed)
            prompt.add_group(token_id, medium)
            continue
        _check_run(medium, start, length, {1})
        for time_s in medium.times_s:
            prompt.add_text([*encode(f"<{time_s:.1f} seconds>"), placeholders.start])
            prompt.add_group(token_id, medium)
            prompt.add_text([placeholders.end])
    prompt.add_text(ids[position:])
    left = [medium for queue in waiting.values() for medium in queue]
    if left:
        raise RequestError(f"{left[0].name}: the prompt has no placeholder left for it")
    return prompt.build()


def _check_run(medium: PreparedMedium, start: int, length: int, allowed: set[int]) -> None:
    if length not in allowed:
        expected = " or ".join(str(count) for count in sorted(allowed))
        raise RequestError(f"{medium.name}: {length} placeholders from token {start} on, expected {expected}")


class _Prompt:
    """Token ids and positions, written from left to right.

    Text counts up on all three axes. A group of patches stays at one time and runs over its rows and columns; text goes
    on behind the longer of the two.
    """

    def __init__(self, merge_size: int) -> None:
        self._merge_size = merge_size
        self._ids: list[int] = []
        self._positions: list[np.ndarray] = []
        self._next_position = 0
        self._spans: dict[int, tuple[PreparedMedium, list[Span]]] = {}  # by identity: a picture may come twice

    def add_text(self, ids: Sequence[int]) -> None:
        self._ids += ids
        positions = np.arange(len(ids), dtype=np.int64) + self._next_position
        self._positions.append(np.broadcast_to(positions, (3, len(ids))))
        self._next_position += len(ids)

    def group_length(self, medium: PreparedMedium) -> int:
        """How many features a picture, or a group of a video's frames, has."""
        return medium.grid[1] * medium.grid[2] // self._merge_size**2

    def add_group(self, token_id: int, medium: PreparedMedium) -> None:
        rows, columns = (side // self._merge_size for side in medium.grid[1:])
        span = Span(len(self._ids), rows * columns)
        self._spans.setdefault(id(medium), (medium, []))[1].append(span)
        self._ids += [token_id] * span.length
        self._positions.append(np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1) + self._next_position)
        self._next_position += max(rows, columns)

    def build(self) -> ModelInputs:
        media = tuple(
            Medium(medium.kind, medium.key, medium.grid, tuple(spans), medium.load)
            for medium, spans in self._spans.values()
        )
        return ModelInputs(tuple(self._ids), np.concatenate(self._positions, axis=1), self._next_position, media)


def _runs(ids: Sequence[int], placeholders: Sequence[int]) -> list[tuple[int, int, int]]:
    """(token id, start, length) of every run of equal placeholders."""
    found: list[tuple[int, int, int]] = []
    for index, token_id in enumerate(ids):
        if token_id not in placeholders:
            continue
        if found and found[-1][0] == token_id and sum(found[-1][1:]) == index:
            found[-1] = (token_id, found[-1][1], found[-1][2] + 1)
        else:
            found.append((token_id, index, 1))
    return found
