"""What an encoder reads in one pass: plain data, so that any process which maps the media buffer can run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops import backend
from tilewright.ops.plan import empty
from tilewright.types import MediaKind, Medium


@dataclass(frozen=True)
class MediaItem:
    """A medium of the batch."""

    kind: MediaKind
    grid: tuple[int, int, int]
    tiling: tuple[int, int]
    first_row: int  # in the buffer
    num_rows: int
    num_features: int  # rows of the encoder's result
    feature_width: int = 0  # of features that came with the request; 0: it is to be encoded

    @classmethod
    def of(cls, medium: Medium) -> MediaItem:
        region = medium.region
        num_features = medium.num_states or medium.num_features
        rows = region.first_row, region.num_rows
        return cls(medium.kind, medium.grid, medium.tiling, *rows, num_features, medium.feature_width)


@dataclass(frozen=True)
class MediaBatch:
    """Media to encode, and the buffer in which their patches lie."""

    buffer: Tensor  # [rows, width]: those of all requests
    items: tuple[MediaItem, ...]

    @classmethod
    def of(cls, buffer: Tensor, media: Sequence[Medium]) -> MediaBatch:
        return cls(buffer, tuple(MediaItem.of(medium) for medium in media))

    def features(self, item: MediaItem) -> Tensor:
        """Those of an item that came with its features [num_features, width], in memory of their own."""
        values = self.buffer[item.first_row : item.first_row + item.num_rows].reshape(-1)
        count = item.num_features * item.feature_width
        return values[:count].view(item.num_features, item.feature_width).to(backend.device(), copy=True)

    def rows(self, items: Sequence[MediaItem]) -> Tensor:
        """The rows of some items, one after the other: where they lie if they are neighbours, else copied once."""
        runs: list[tuple[int, int]] = []
        for item in items:
            end = item.first_row + item.num_rows
            if runs and runs[-1][1] == item.first_row:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((item.first_row, end))
        parts = [self.buffer[begin:end] for begin, end in runs]
        if len(parts) == 1:
            return parts[0].to(backend.device())
        copied = empty((sum(map(len, parts)), self.buffer.shape[1]), self.buffer.dtype)
        return torch.cat([part.to(copied.device) for part in parts], out=copied)
