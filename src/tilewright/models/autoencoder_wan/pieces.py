"""A clip in parts: pieces of a few frames, and tiles of a few pixels.

Where a pixel sees no further than its neighbourhood, a tile with as many pixels around it has the values of the whole,
bit for bit: nothing needs to be blended. A tile goes through with all its frames before the next one does, so that what
convolutions keep of earlier frames is a tile's too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from tilewright.layers.feature_memory import FeatureMemory
from tilewright.models.autoencoder_wan.blocks import History
from tilewright.models.vae import memory_budget

MIN_SIDE, SIDE_STEP = 64, 32  # of a tile that memory asks for, in pixels of the network's largest maps

Network = Callable[[Tensor, History, FeatureMemory], Tensor]


def pieces_of(x_BTHWC: Tensor, num_frames: int) -> Iterator[tuple[Tensor, History]]:
    """The first frame, then `num_frames` at a time, with the history of those before."""
    history = History()
    total = x_BTHWC.shape[1]
    for begin in (0, *range(1, total, num_frames)):
        end = begin + num_frames if begin else 1
        history.is_first, history.is_last = begin == 0, end >= total
        yield x_BTHWC[:, begin:end].contiguous(), history


def spans_of(length: int, side: int, reach: int, step: int) -> Iterator[tuple[slice, slice]]:
    """What is computed and what is read for it, of parts of an axis; all begin at multiples of `step`."""
    side, reach = -(-side // step) * step, -(-reach // step) * step
    for begin in range(0, length, side):
        end = min(begin + side, length)
        yield slice(begin, end), slice(max(begin - reach, 0), min(end + reach, length))


def in_tiles(
    network: Network, x_BTHWC: Tensor, *, num_frames: int, side: int, reach: int, step: int, growth: Fraction
) -> Tensor:
    """The network's result of a clip, computed in tiles of `side` pixels of it, each with `reach` pixels around it.

    Pieces are of `num_frames`. A pixel becomes `growth` pixels in rows and columns; tiles begin at multiples of `step`.
    """
    result: Tensor | None = None
    _, _, height, width, _ = x_BTHWC.shape
    memory = FeatureMemory()

    def grown(span: slice, origin: int = 0) -> slice:
        return slice(int((span.start - origin) * growth), int((span.stop - origin) * growth))

    for rows, seen_rows in spans_of(height, side, reach, step):
        for columns, seen_columns in spans_of(width, side, reach, step):
            here = (slice(None), slice(None), grown(rows, seen_rows.start), grown(columns, seen_columns.start))
            tile = x_BTHWC[:, :, seen_rows, seen_columns].clone(memory_format=torch.contiguous_format)
            clip = torch.cat(
                [
                    taken_from(memory, network(piece, history, memory), here)
                    for piece, history in pieces_of(tile, num_frames)
                ],
                dim=1,
            )
            if result is None:
                result = clip.new_empty(*clip.shape[:2], int(height * growth), int(width * growth), clip.shape[-1])
            result[:, :, grown(rows), grown(columns)] = clip
    assert result is not None
    return result


def taken_from(memory: FeatureMemory, result: Tensor, part: tuple[slice, ...] = ()) -> Tensor:
    """A copy of a result, or of a part of it, whose memory is free again."""
    copy = result[part].clone(memory_format=torch.contiguous_format)
    memory.give(result)
    return copy


def chosen_side(
    pixels: int, batch: int, widths: Sequence[int], num_resnets: int, num_frames: int, reach: int, itemsize: int
) -> int | None:
    """The side of tiles that memory has room for, in pixels of the largest maps; None where it has for all of them.

    `widths` are the channels of the stages, from the largest maps on; a piece has `num_frames` there. Three maps of a
    stage are in memory, and two frames for each of its convolutions.
    """
    maps = 3 * num_frames * widths[0]
    kept = sum(4 * num_resnets * width / 4**i for i, width in enumerate(widths)) if num_frames > 1 else 0
    pixel_bytes = batch * itemsize * (maps + kept)
    budget = memory_budget()
    if pixels * pixel_bytes <= budget:
        return None
    side = math.isqrt(int(budget / pixel_bytes)) - 2 * reach
    return max(side // SIDE_STEP * SIDE_STEP, MIN_SIDE)
