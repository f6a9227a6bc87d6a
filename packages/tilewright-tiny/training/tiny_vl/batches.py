"""Lessons as tensors: images of one size, and their questions behind one another in rows of one length."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny_vl.clips import clip_lesson
from training.tiny_vl.items import image_lesson
from training.tiny_vl.lesson import Ask, Lesson, casual
from training.tiny_vl.pairs import pair_lesson
from training.tiny_vl.talk import talk

MERGED_PATCH = 32
ROW_LENGTH = 320
MOST_ASKS = 9
# What the preprocessor makes of images: square ones mostly, the others so that any shape of photograph is known.
SIZES = ((256, 256),) * 6 + (
    (288, 192),
    (192, 288),
    (320, 192),
    (192, 320),
    (256, 224),
    (224, 256),
    (384, 160),
    (160, 384),
)
# Frames, width, height of clips.
CLIPS = ((8, 128, 128), (8, 128, 128), (6, 128, 128), (4, 128, 128), (4, 160, 160), (8, 160, 96), (8, 96, 160))
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a helpful AI assistant that can see pictures.",
    "Be concise.",
)
NO_TARGET = -100
PADDING, PREFIX = -1, 0  # segments; questions count from 1, talk without an image from TALK
TALK = 1000


@dataclass
class Batch:
    frames: Tensor  # uint8 (batch, frames or images, height, width, 3)
    ids: Tensor  # (batch, length)
    targets: Tensor  # (batch, length): the token that comes next, NO_TARGET where nobody asks
    positions: Tensor  # (3, batch, length)
    segments: Tensor  # (batch, length)
    slots: Tensor  # (batch, media tokens)
    is_clip: bool

    def to(self, device: str) -> Batch:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return Batch(**values)


class Encoder:
    """Lays lessons out as rows of tokens."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.ids_of = lru_cache(1 << 16)(self._ids_of)

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prefix(self, lesson: Lesson, grid: tuple[int, int], times_s: list[float], system: str | None) -> list[int]:
        """A conversation up to the first question."""
        pads = grid[0] * grid[1]
        text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        text += "<|im_start|>user\n"
        if lesson.is_clip:
            text += "".join(
                f"<{time_s:.1f} seconds><|vision_start|>{'<|video_pad|>' * pads}<|vision_end|>" for time_s in times_s
            )
        else:
            text += f"<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>" * len(lesson.images)
        return list(self.ids_of(text))

    def turn(self, ask: Ask) -> tuple[list[int], int]:
        """A question and its answer, and where the answer begins."""
        question = self.ids_of(f"{ask.question}<|im_end|>\n<|im_start|>assistant\n")
        answer = self.ids_of(f"{ask.answer}<|im_end|>")
        return [*question, *answer], len(question)


class Row:
    """One lesson's tokens, filled from the left."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ids: list[int] = []
        self.targets: list[int] = []
        self.positions: list[np.ndarray] = []
        self.segments: list[int] = []

    def has_room(self, count: int) -> bool:
        return len(self.ids) + count <= self.length

    def add(self, ids: list[int], positions: np.ndarray, segment: int, answer_from: int | None) -> None:
        self.ids += ids
        self.positions.append(positions)
        self.segments += [segment] * len(ids)
        if answer_from is None:
            self.targets += [NO_TARGET] * len(ids)
        else:
            self.targets += [NO_TARGET] * (answer_from - 1) + ids[answer_from:] + [NO_TARGET]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        rest = self.length - len(self.ids)
        positions = np.concatenate([*self.positions, np.zeros((3, rest), np.int64)], 1)
        return (
            np.array(self.ids + [0] * rest),
            np.array(self.targets + [NO_TARGET] * rest),
            positions,
            np.array(self.segments + [PADDING] * rest),
        )


def media_positions(ids: list[int], media_id: int, grid: tuple[int, int], start: int = 0) -> tuple[np.ndarray, int]:
    """Positions of tokens among which are frames of `grid` merged patches, and the one that comes next."""
    rows, columns = grid
    down, across = np.divmod(np.arange(rows * columns), columns)
    positions = np.empty((3, len(ids)), np.int64)
    index, here = 0, start
    while index < len(ids):
        if ids[index] == media_id:
            end = index + rows * columns
            positions[:, index:end] = (np.full_like(down, here), here + down, here + across)
            index, here = end, here + max(rows, columns)
        else:
            positions[:, index] = here
            index, here = index + 1, here + 1
    return positions, here


def clip_times(rng: Random, num_frames: int) -> list[float]:
    """Seconds of each pair of frames, as sampling two frames a second from a video of some rate gives them."""
    fps = rng.choice((2.0, 2.0, 10.0, 24.0, 25.0, 30.0))
    total = int(num_frames / 2 * fps + rng.random() * fps / 2) if fps > 2 else num_frames
    if num_frames == 8 and rng.random() < 0.2:
        total = int(total * rng.uniform(1, 2))  # longer than what is looked at
    seconds = np.linspace(0, total - 1, num_frames).round() / fps
    return [(first + second) / 2 for first, second in seconds.reshape(-1, 2).tolist()]


def lay_out(rng: Random, encoder: Encoder, lesson: Lesson, system: str | None, question_is_first: bool) -> Row:
    """A lesson's row; its questions are told apart by segments, or follow one another as a conversation."""
    width, height = lesson.images[0].size
    grid = (height // MERGED_PATCH, width // MERGED_PATCH)
    times_s = clip_times(rng, len(lesson.images)) if lesson.is_clip else []
    prefix = encoder.prefix(lesson, grid, times_s, system)
    media_id = encoder.ids_of("<|video_pad|>" if lesson.is_clip else "<|image_pad|>")[0]
    row = Row(ROW_LENGTH)
    asks = [replace(ask, question=casual(rng, ask.question)) for ask in lesson.asks]
    between = encoder.ids_of("\n<|im_start|>user\n")
    if question_is_first and asks:
        # The media come behind the question, which takes their place right after the role.
        question, answer = encoder.ids_of(asks[0].question), encoder.ids_of(f"{asks[0].answer}<|im_end|>")
        start = prefix.index(encoder.ids_of("<|vision_start|>")[0])
        ending = encoder.ids_of("<|im_end|>\n<|im_start|>assistant\n")
        ids = [*prefix[:start], *question, *prefix[start:], *ending, *answer]
        positions, _ = media_positions(ids, media_id, grid)
        row.add(ids, positions, PREFIX, len(ids) - len(answer))
        return row
    positions, here = media_positions(prefix, media_id, grid)
    row.add(prefix, positions, PREFIX, None)
    is_conversation = rng.random() < 0.15
    segment = 1
    for number, ask in enumerate(asks):
        ids, answer_from = encoder.turn(ask)
        if is_conversation and number:
            ids, answer_from = [*between, *ids], answer_from + len(between)
        if not row.has_room(len(ids)):
            break
        row.add(ids, np.tile(np.arange(here, here + len(ids)), (3, 1)), segment, answer_from)
        if is_conversation:
            here += len(ids)
        else:
            segment += 1
    if rng.random() < 0.4:
        told = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        opening = list(encoder.ids_of(f"{told}<|im_start|>user\n"))
        ids, answer_from = encoder.turn(talk(rng))
        ids = opening + ids
        if row.has_room(len(ids)):
            row.add(ids, np.tile(np.arange(len(ids)), (3, 1)), TALK, answer_from + len(opening))
    return row


def make_batch(rng: Random, encoder: Encoder, batch_size: int, photos: Path | None = None) -> Batch:
    way = rng.random()
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
    question_is_first = False
    if way < 0.76:
        width, height = rng.choice(SIZES)
        question_is_first = rng.random() < 0.08
        lessons = [image_lesson(rng, width, height, MOST_ASKS, photos) for _ in range(batch_size)]
    elif way < 0.88:
        batch_size //= 2
        question_is_first = rng.random() < 0.05
        lessons = [pair_lesson(rng, 256, 256, MOST_ASKS) for _ in range(batch_size)]
    else:
        num_frames, width, height = rng.choice(CLIPS)
        lessons = [clip_lesson(rng, width, height, num_frames, MOST_ASKS) for _ in range(batch_size)]
    return collate(rng, encoder, [worn(rng, lesson) for lesson in lessons], system, question_is_first)


def worn(rng: Random, lesson: Lesson) -> Lesson:
    """The lesson, now and then with the marks that lossy compression leaves."""
    if rng.random() > 0.1:
        return lesson
    quality = rng.randint(40, 90)
    images = []
    for image in lesson.images:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        images.append(Image.open(file).convert("RGB"))
    return replace(lesson, images=tuple(images))


def collate(
    rng: Random, encoder: Encoder, lessons: list[Lesson], system: str | None = None, question_is_first: bool = False
) -> Batch:
    rows = [lay_out(rng, encoder, lesson, system, question_is_first).arrays() for lesson in lessons]
    ids, targets, positions, segments = (np.stack(column) for column in zip(*rows, strict=True))
    is_clip = lessons[0].is_clip
    media_id = encoder.ids_of("<|video_pad|>" if is_clip else "<|image_pad|>")[0]
    slots = np.nonzero(ids == media_id)[1].reshape(len(ids), -1)
    frames = np.stack([np.stack([np.asarray(image) for image in lesson.images]) for lesson in lessons])
    return Batch(
        torch.from_numpy(frames),
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions.transpose(1, 0, 2).copy()),
        torch.from_numpy(segments),
        torch.from_numpy(slots),
        is_clip,
    )


def attention_mask(segments: Tensor) -> Tensor:
    """(batch, 1, length, length): what came before of the same segment, and the prefix unless it is talk."""
    query, key = segments[:, :, None], segments[:, None, :]
    seen = (query == key) | ((key == PREFIX) & (query > PREFIX) & (query < TALK))
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return (seen & causal).unsqueeze(1)


def as_pixels(frames: Tensor, is_clip: bool, noise: float = 0.0) -> Tensor:
    """uint8 (batch, count, height, width, 3) to what the network takes: a still image is two equal frames.

    Half of the rows get noise, of at most this strength.
    """
    pixels = frames.permute(0, 1, 4, 2, 3).float() / 127.5 - 1
    if noise:
        strength = 2 * torch.rand(len(pixels), 1, 1, 1, 1, device=pixels.device) - 1
        pixels = pixels + torch.randn_like(pixels) * (noise * strength.clamp(min=0))
    if is_clip:
        return pixels.unflatten(1, (-1, 2))
    return pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1, -1)


class Lessons(torch.utils.data.IterableDataset):
    """Batches without end; each worker draws from seeds of its own."""

    def __init__(self, tokenizer_file: Path, batch_size: int, seed: int, photos: Path | None = None) -> None:
        self._tokenizer_file, self._batch_size, self._seed = tokenizer_file, batch_size, seed
        self._photos = photos

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        number = worker.id if worker else 0
        rng = Random(self._seed * 1000 + number)
        encoder = Encoder(self._tokenizer_file)
        while True:
            yield make_batch(rng, encoder, self._batch_size, self._photos)
