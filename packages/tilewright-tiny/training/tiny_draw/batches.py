"""Drawings as tensors: a batch has images of one size and captions of one padded length."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from random import Random
from typing import TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from training.tiny_draw.captions import Drawing, drawings
from training.tiny_draw.network import CAPTION_MULTIPLE

SIZES = ((256, 256), (256, 256), (256, 256), (256, 256), (320, 192), (192, 320), (288, 224), (224, 288), (224, 224))
NO_CAPTION = 0.1  # of the images have an empty one, which guidance leads away from
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # as the pipeline asks its text encoder

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Batch:
    images: Tensor  # uint8 [B, H, W, 3]
    ids: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]: what follows is padding

    def to(self, device: str) -> Batch:
        return Batch(*(x.to(device, non_blocking=True) for x in (self.images, self.ids, self.lengths)))

    def pin_memory(self) -> Batch:
        return Batch(*(x.pin_memory() for x in (self.images, self.ids, self.lengths)))


class Drawings(IterableDataset[Batch]):
    """Batches of the training set, without end; each worker draws others."""

    def __init__(
        self, tokenizer_file: Path, batch_size: int, seed: int, sizes: tuple[tuple[int, int], ...] = SIZES
    ) -> None:
        self.tokenizer_file, self.batch_size, self.seed, self.sizes = tokenizer_file, batch_size, seed, sizes

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = Random(self.seed * 1000 + (worker.id if worker else 0))
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        sources = {size: drawings(rng, *size) for size in self.sizes}
        waiting: dict[tuple[tuple[int, int], int], list[tuple[Drawing, list[int]]]] = defaultdict(list)
        while True:
            size = rng.choice(self.sizes)
            drawing = next(sources[size])
            ids = prompt_ids(tokenizer, "" if rng.random() < NO_CAPTION else drawing.caption)
            length = -(-len(ids) // CAPTION_MULTIPLE) * CAPTION_MULTIPLE
            group = waiting[size, length]
            group.append((drawing, ids))
            if len(group) == self.batch_size:
                yield as_batch(group, length)
                group.clear()


def met_again(
    fresh: Iterator[Batch], prepare: Callable[[Batch], _Made], max_stored: int, rng: Random
) -> Iterator[_Made]:
    """Every batch once it is drawn, as `prepare` makes it, and ones met before while there is no new one: drawing
    takes longer than a step, and noise is new each time.
    """
    drawn: Queue[Batch] = Queue(maxsize=4)

    def draw() -> None:
        for batch in fresh:
            drawn.put(batch)

    threading.Thread(target=draw, daemon=True).start()
    stored: deque[_Made] = deque(maxlen=max_stored)
    while True:
        try:
            batch = drawn.get(block=not stored)
        except Empty:
            yield rng.choice(stored)
        else:
            stored.append(prepare(batch))
            yield stored[-1]


def prompt_ids(tokenizer: Tokenizer, caption: str) -> list[int]:
    return tokenizer.encode(PROMPT.format(caption)).ids


def as_batch(group: list[tuple[Drawing, list[int]]], length: int) -> Batch:
    images = np.stack([np.asarray(drawing.scene.draw()) for drawing, _ in group])
    ids = torch.tensor([row + [0] * (length - len(row)) for _, row in group])
    return Batch(torch.from_numpy(images), ids, torch.tensor([len(row) for _, row in group]))


def as_pixels(images: Tensor) -> Tensor:
    """[B, 3, H, W] in -1 to 1."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1).contiguous(memory_format=torch.channels_last)
