"""A step as plain data: a header of integers and arrays at fixed offsets of one flat buffer.

The scheduler's side writes it (engine/run/writer.py), runners read it (engine/run/runner.py). It has no addresses and
no Python objects, so the buffer may be shared memory that runners in other processes map, and the model's inputs in it
reach another device in one copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.schedule.step import StepLimits
from tilewright.layers.batch import Batch, CrossBatch, FeatureRun, PageTable, StateBatch
from tilewright.models.protocol import MediaItem
from tilewright.ops import backend
from tilewright.ops.attention import KvCache
from tilewright.ops.device import Copy, NoCopy
from tilewright.types import MEDIA_KINDS

ALIGNMENT = 64  # bytes, a cache line


class StepHeader(NamedTuple):
    """The number of filled entries of each array."""

    num_tokens: int
    num_sequences: int
    num_logit_rows: int
    num_feature_runs: int = 0
    num_cross_rows: int = 0
    num_cross_spans: int = 0
    num_encoded: int = 0
    num_dropped: int = 0
    num_cross_fills: int = 0
    keeps_hidden: int = 0  # 1: the hidden states of all tokens are kept for a predictor
    media_are_ahead: int = 0  # 1: the media to encode were sent to the device before the step

    @property
    def needs_all_logits(self) -> bool:
        return self.num_logit_rows == self.num_tokens


_HEADER = struct.Struct(f"={len(StepHeader._fields)}q")  # ten times as fast as numpy for eleven numbers
NUM_ENCODED_COLUMNS = 11  # of a row of `encoded`


def encoded_row(feature_id: int, item: MediaItem) -> tuple[int, ...]:
    """Return a row of `encoded`: a medium to encode, and the id that its features get."""
    sizes = item.first_row, item.num_rows, item.num_features, item.feature_width
    return feature_id, MEDIA_KINDS.index(item.kind), *item.grid, *item.tiling, *sizes


def read_encoded_row(row: Items[int]) -> tuple[int, MediaItem]:
    """Return what `encoded_row` made the row of."""
    feature_id, kind, groups, rows, columns, tile_rows, tile_columns, *sizes = row
    return feature_id, MediaItem(MEDIA_KINDS[kind], (groups, rows, columns), (tile_rows, tile_columns), *sizes)


@dataclass(frozen=True)
class ArrayPlace:
    """The place of an array in the buffer."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def slots_name(window: int) -> str:
    """Return the name of the array of slots in layers with a sliding window."""
    return f"slots_{window}"


def table_name(window: int) -> str:
    """Return the name of the block table of layers with a sliding window."""
    return f"block_table_{window}"


class StepLayout:
    """Offsets of the arrays in a buffer. Equal arguments give equal layouts, in every process.

    The model's inputs come first, block tables last among them: a copy to a device ends with the last row in use.
    `window_pages` are the pages of layers with a sliding window, by window.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        num_axes: int,
        page_size: int,
        num_pages: int,
        num_cross_pages: int = 0,
        window_pages: Mapping[int, int] | None = None,
    ) -> None:
        self.page_size = page_size
        self.window_pages = window_pages or {}
        max_tokens, max_sequences = limits.max_tokens_per_step, limits.max_sequences
        max_pages = min(num_pages, -(-limits.max_context // page_size))
        # A medium has at least one patch, and its cross-attention states at least one slot. At most one span per token,
        # and all pages: most of it is never touched, and takes no memory.
        max_media, max_states = limits.max_encode_patches, num_cross_pages * page_size
        max_spans = max_tokens if num_cross_pages else 0
        long, integer = torch.int64, torch.int32
        self.places: dict[str, ArrayPlace] = {}
        self.size_bytes = 0
        tables = [("block_table", integer, (max_sequences, max_pages))]
        tables += [(table_name(window), integer, (max_sequences, max_pages)) for window in self.window_pages]
        self.last_table = tables[-1][0]  # the last table with a row for each sequence
        for name, dtype, shape in (
            ("token_ids", long, (max_tokens,)),
            ("positions", long, (num_axes, max_tokens)),
            ("slots", long, (max_tokens,)),
            *((slots_name(window), long, (max_tokens,)) for window in self.window_pages),
            ("query_starts", integer, (max_sequences + 1,)),
            ("kv_lengths", integer, (max_sequences,)),
            ("logit_rows", long, (max_tokens,)),
            ("read_slots", integer, (max_sequences,)),
            ("write_slots", integer, (max_tokens,)),
            ("hidden_rows", long, (max_tokens,)),  # of a predictor's inputs: rows whose hidden states its tokens read
            *tables,
            ("cross_rows", long, (max_spans,)),
            ("cross_query_starts", integer, (max_spans + 1,)),
            ("cross_lengths", integer, (max_spans,)),
            ("cross_fill_slots", long, (max_states,)),
            ("cross_block_table", integer, (max_spans, num_cross_pages)),
            ("header", long, (len(StepHeader._fields),)),
            # Of a predictor's inputs: the first row of each sequence in the step, its number of drafts, and the
            # position of the token after its last one.
            ("draft_first_rows", long, (max_sequences,)),
            ("draft_counts", long, (max_sequences,)),
            ("draft_positions", long, (max_sequences,)),
            ("encoded", long, (max_media, NUM_ENCODED_COLUMNS)),
            ("dropped_ids", long, (max_media,)),
            ("feature_runs", long, (max_tokens, 4)),  # feature id, first feature, first row of the batch, length
            # Feature ids and numbers of states, whose keys and values go to the next slots of `cross_fill_slots`.
            ("cross_fills", long, (max_states, 2)),
        ):
            self.places[name] = ArrayPlace(self.size_bytes, dtype, shape)
            size_bytes = math.prod(shape) * dtype.itemsize
            self.size_bytes += -(-size_bytes // ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the arrays that lie in `memory`."""
        found = {}
        for name, place in self.places.items():
            end = place.offset + math.prod(place.shape) * place.dtype.itemsize
            if end <= len(memory):
                found[name] = memory[place.offset : end].view(place.dtype).view(place.shape)
        return found

    def end_of(self, name: str, num_rows: int) -> int:
        """Return where the first rows of an array end, in bytes."""
        place = self.places[name]
        return place.offset + num_rows * math.prod(place.shape[1:]) * place.dtype.itemsize


class StepInputs:
    """The arrays of a layout as views of a buffer: `tensors` for the model, `arrays` to fill them through numpy.

    Their addresses are fixed: a recorded step reads them again. On a device other than the host `tensors` are in its
    own memory; `send` copies the filled arrays there, and `recycle` must come before they are filled again.
    """

    def __init__(self, layout: StepLayout, buffer: Tensor | None = None) -> None:
        """Make views of `buffer`, uint8 [layout.size_bytes]; None: of new memory of this process."""
        self.layout = layout
        self._device = device = backend.place()
        self._memory = device.host_bytes(layout.size_bytes) if buffer is None else buffer
        own = layout.views(self._memory)
        self.arrays: dict[str, np.ndarray] = {name: view.numpy() for name, view in own.items()}
        self._header = self.arrays["header"].data
        self._copy: Copy = NoCopy()
        self.tensors = own
        if not device.is_host:
            num_bytes = layout.places["header"].offset
            self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
            self.tensors = layout.views(self._there)

    def send(self) -> None:
        """Start the one copy of the step's model inputs to a device other than the host."""
        header = self.header
        end = self.layout.end_of(self.layout.last_table, header.num_sequences)
        if header.num_cross_spans or header.num_cross_fills:
            end = self.layout.end_of("cross_block_table", header.num_cross_spans)
        _, self._copy = self._device.upload(self._memory[:end], self._there[:end])

    def pad(self, header: StepHeader, num_rows: int) -> StepHeader:
        """Pad a step of one-token sequences to `num_rows` rows, and return its header.

        `header` has fewer rows, of one token each. The padding writes and reads nothing.
        """
        count, arrays = header.num_sequences, self.arrays
        arrays["token_ids"][count:num_rows] = 0
        arrays["positions"][:, count:num_rows] = 0
        for name in ("slots", *map(slots_name, self.layout.window_pages)):
            arrays[name][count:num_rows] = -1
        arrays["query_starts"][count + 1 : num_rows + 1] = range(count + 1, num_rows + 1)
        arrays["kv_lengths"][count:num_rows] = 0
        arrays["read_slots"][count:num_rows] = -1
        arrays["write_slots"][count:num_rows] = -1
        return header._replace(num_tokens=num_rows, num_sequences=num_rows, num_logit_rows=num_rows)

    def recycle(self) -> None:
        """Return when the arrays may be written again."""
        self._copy.recycle()
        self._copy = NoCopy()

    @property
    def header(self) -> StepHeader:
        return StepHeader._make(_HEADER.unpack_from(self._header))

    def write_header(self, header: StepHeader) -> None:
        _HEADER.pack_into(self._header, 0, *header)

    def logit_rows(self, header: StepHeader) -> Tensor | None:
        """Return the rows whose logits are wanted; None: all."""
        return None if header.needs_all_logits else self.tensors["logit_rows"][: header.num_logit_rows]

    def batch(
        self,
        header: StepHeader,
        kv_caches: Items[KvCache],
        feature_runs: Items[FeatureRun] = (),
        cross: CrossBatch | None = None,
        states: StateBatch | None = None,
        *,
        recorded: bool = True,
    ) -> Batch:
        """Return the filled inputs as views. Without `recorded`, the block table has only the columns in use."""
        tensors, num_tokens, num_sequences = self.tensors, header.num_tokens, header.num_sequences
        num_pages = self.num_pages(header, recorded=recorded)
        return Batch(
            token_ids_T=tensors["token_ids"][:num_tokens],
            positions_AT=tensors["positions"][:, :num_tokens],
            slots_T=tensors["slots"][:num_tokens],
            query_starts=tensors["query_starts"][: num_sequences + 1],
            kv_lengths=tensors["kv_lengths"][:num_sequences],
            block_table=tensors["block_table"][:num_sequences, :num_pages],
            kv_caches=kv_caches,
            windows={
                window: PageTable(
                    tensors[slots_name(window)][:num_tokens], tensors[table_name(window)][:num_sequences, :num_pages]
                )
                for window in self.layout.window_pages
            },
            logit_rows=self.logit_rows(header),
            feature_runs=feature_runs,
            cross=cross,
            states=states,
        )

    def cross_batch(self, header: StepHeader, kv_caches: Items[KvCache], *, recorded: bool = True) -> CrossBatch | None:
        """Return the cross-attention inputs as views; None if no token attends to encoder states."""
        num_rows, num_spans = header.num_cross_rows, header.num_cross_spans
        if not num_spans:
            return None
        tensors = self.tensors
        num_pages = self.num_cross_pages(header, recorded=recorded)
        return CrossBatch(
            rows_R=None if num_rows == header.num_tokens else tensors["cross_rows"][:num_rows],
            query_starts=tensors["cross_query_starts"][: num_spans + 1],
            lengths=tensors["cross_lengths"][:num_spans],
            block_table=tensors["cross_block_table"][:num_spans, :num_pages],
            kv_caches=kv_caches,
        )

    def num_pages(self, header: StepHeader, *, recorded: bool) -> int:
        """Return the number of block table columns of a batch."""
        return self._num_columns("block_table", "kv_lengths", header.num_sequences, recorded)

    def num_cross_pages(self, header: StepHeader, *, recorded: bool) -> int:
        return self._num_columns("cross_block_table", "cross_lengths", header.num_cross_spans, recorded)

    def _num_columns(self, table: str, lengths: str, num_rows: int, recorded: bool) -> int:
        """Return how many columns of a block table a batch has.

        Recorded steps on the host, whose arguments are fixed, have all columns, others those in use. The torch backend
        gathers the pages of every column, so a device's recordings use powers of two.
        """
        all_columns: int = self.arrays[table].shape[1]
        if recorded and self._device.is_host:
            return all_columns
        needed = -(-int(self.arrays[lengths][:num_rows].max(initial=1)) // self.layout.page_size)
        return min(1 << (needed - 1).bit_length(), all_columns) if recorded else needed
