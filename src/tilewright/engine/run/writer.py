"""Writes the scheduler's steps into the buffer that runners read (engine/run/inputs.py)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from tilewright.engine.kv.cross import CrossCache, CrossGroup
from tilewright.engine.media.encoder_cache import EncoderCache
from tilewright.engine.run.inputs import StepHeader, StepInputs, encoded_row, slots_name, table_name
from tilewright.engine.schedule.sequence import NO_SLOT
from tilewright.engine.schedule.step import Chunk, DraftInput, Step, last_rows
from tilewright.models.protocol import MediaItem
from tilewright.types import Medium


class WindowWriter:
    """Writes the pages of sequences in layers with one sliding window."""

    def __init__(self, inputs: StepInputs, window: int) -> None:
        self.window = window
        self.slots, self.table = inputs.arrays[slots_name(window)], inputs.arrays[table_name(window)]
        # Kernels read keys in blocks of 512, also those before the window, which they mask. There the table has a page
        # of zeros, the one after those that are allocated.
        self._empty_page = inputs.layout.window_pages[window]
        self._held: list[tuple[int, list[int]]] = [(0, []) for _ in range(len(self.table))]  # by row, as last written

    def write(self, chunks: Items[Chunk | DraftInput]) -> None:
        for index, chunk in enumerate(chunks):
            held = chunk.sequence.window_pages[self.window]
            if self._held[index] != (held.first, held.pages):
                self._held[index] = held.first, held.pages.copy()
                self.table[index, : held.first] = self._empty_page
                self.table[index, held.first : held.stop] = held.pages


class TokenWriter:
    """Writes tokens, their positions and the slots of their keys: of a step's chunks, or of a predictor's pass."""

    def __init__(self, inputs: StepInputs, windows: Iterable[int] = ()) -> None:
        self.page_size = inputs.layout.page_size
        arrays = inputs.arrays
        self._token_ids, self._positions, self._slots = arrays["token_ids"], arrays["positions"], arrays["slots"]
        self._query_starts, self._kv_lengths = arrays["query_starts"], arrays["kv_lengths"]
        self._block_table = arrays["block_table"]
        self._numbers = np.arange(len(self._token_ids) + 1)
        # Pages in each row of the block table: in a step that decodes they change only once per 64 tokens.
        self._pages: list[list[int]] = [[] for _ in range(len(self._block_table))]
        self._windows = [WindowWriter(inputs, window) for window in windows]

    def write(self, chunks: Items[Chunk | DraftInput]) -> int:
        """Write the chunks' tokens and return their number."""
        num_sequences = len(chunks)
        token_ids: list[int] = []
        for index, chunk in enumerate(chunks):
            token_ids += chunk.token_ids
            pages = chunk.sequence.pages
            if self._pages[index] != pages:
                self._pages[index] = pages.copy()
                self._block_table[index, : len(pages)] = pages
        num_tokens = len(token_ids)
        lengths, stops, offsets = np.array(
            [(chunk.num_tokens, chunk.stop, chunk.sequence.position_offset) for chunk in chunks]
        ).T
        if num_tokens == num_sequences:  # one token each, as in most steps
            ends, rows, places = self._numbers[1 : num_sequences + 1], self._numbers[:num_sequences], stops - 1
            positions = places + offsets
        else:
            ends = lengths.cumsum()
            rows = self._numbers[:num_sequences].repeat(lengths)
            places = self._numbers[:num_tokens] + (stops - ends)[rows]
            positions = places + offsets[rows]
        pages_before, in_page = np.divmod(places, self.page_size)
        self._token_ids[:num_tokens] = token_ids
        self._positions[:, :num_tokens] = positions
        self._slots[:num_tokens] = self._block_table[rows, pages_before] * self.page_size + in_page
        for window in self._windows:
            window.write(chunks)
            window.slots[:num_tokens] = window.table[rows, pages_before] * self.page_size + in_page
        self._query_starts[1 : num_sequences + 1] = ends
        self._kv_lengths[:num_sequences] = stops
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            if chunk.start < chunk.sequence.num_prompt_tokens:  # positions as the prompt has them
                self._positions[:, end - chunk.num_tokens : end] = chunk.sequence.positions(chunk.start, chunk.stop)
        return num_tokens


class StepWriter:
    """Writes a Step. Media are referred to by ids of the encoder cache, cross-attention groups by their pages."""

    def __init__(
        self, inputs: StepInputs, features: EncoderCache, cross_cache: CrossCache, *, has_states: bool
    ) -> None:
        self.inputs = inputs
        self.features = features
        self.cross_cache = cross_cache
        self.has_states = has_states
        self._tokens = TokenWriter(inputs, inputs.layout.window_pages)
        self._arrays = inputs.arrays

    def write(self, step: Step, *, media_are_ahead: bool = False) -> None:
        """Write a step. `media_are_ahead`: `send_ahead` has sent the media of step.encode to the runner's device."""
        chunks = step.chunks
        # In this order: a dropped id may be assigned to a medium that is encoded in this step.
        num_dropped = self._write_dropped() if self.features.num_dropped else 0
        num_encoded = self._write_encoded(step.encode) if step.encode else 0
        num_fills = self._write_fills(step.cross_groups) if step.cross_groups else 0
        num_tokens = self._tokens.write(chunks) if chunks else 0
        if self.has_states:
            self._write_states(chunks)
        num_rows, num_spans = self._write_cross_spans(chunks) if self.cross_cache.num_pages else (0, 0)
        runs = feature_runs(self.features, chunks)
        if runs:
            self._arrays["feature_runs"][: len(runs)] = runs
        num_logits = step.num_logits
        if num_logits != num_tokens:
            rows = last_rows((chunk.num_tokens for chunk in chunks), (chunk.num_logits for chunk in chunks))
            self._arrays["logit_rows"][:num_logits] = rows
        self.inputs.write_header(
            StepHeader(
                num_tokens,
                len(chunks),
                num_logits,
                len(runs),
                num_rows,
                num_spans,
                num_encoded,
                num_dropped,
                num_fills,
                step.keeps_hidden,
                media_are_ahead,
            )
        )

    def _write_dropped(self) -> int:
        """Write the ids of dropped features, as many as fit; the next step reports the others. Return their number."""
        ids = self.features.pop_dropped(len(self._arrays["dropped_ids"]))
        self._arrays["dropped_ids"][: len(ids)] = ids
        return len(ids)

    def _write_encoded(self, media: Items[Medium]) -> int:
        rows = [encoded_row(self.features.id_of(medium.key), MediaItem.of(medium)) for medium in media]
        self._arrays["encoded"][: len(media)] = rows
        return len(media)

    def _write_states(self, chunks: Items[Chunk]) -> None:
        """Write where each sequence's recurrent state is read, and after which tokens it is stored."""
        read_slots, write_slots = self._arrays["read_slots"], self._arrays["write_slots"]
        begin = 0
        for index, chunk in enumerate(chunks):
            slots = chunk.sequence.state_slots
            assert slots is not None, f"sequence {chunk.sequence.id} has no state"
            read_slots[index] = slots.read
            write_slots[begin : begin + chunk.num_tokens] = NO_SLOT
            for count, slot in slots.kept.items():
                write_slots[begin + count - 1 - chunk.start] = slot
            begin += chunk.num_tokens

    def _write_cross_spans(self, chunks: Items[Chunk]) -> tuple[int, int]:
        """Write the tokens that see encoder states; return how many they are, and in how many spans."""
        rows, query_starts = self._arrays["cross_rows"], self._arrays["cross_query_starts"]
        lengths, block_table = self._arrays["cross_lengths"], self._arrays["cross_block_table"]
        num_rows = num_spans = begin = 0
        for chunk in chunks:
            for span in chunk.sequence.cross_spans(chunk.start, chunk.stop):
                first, count = begin + span.start - chunk.start, span.stop - span.start
                rows[num_rows : num_rows + count] = range(first, first + count)
                num_rows += count
                pages = self.cross_cache.pages(span.group.key)
                block_table[num_spans, : len(pages)] = pages
                lengths[num_spans] = span.num_states
                num_spans += 1
                query_starts[num_spans] = num_rows
            begin += chunk.num_tokens
        return num_rows, num_spans

    def _write_fills(self, groups: Items[CrossGroup]) -> int:
        """Write the media whose keys and values for cross-attention are to be computed; return their number."""
        fills = [(self.features.id_of(medium.key), medium.num_states) for group in groups for medium in group.media]
        slots = [self.cross_cache.slots(group.key, group.num_states) for group in groups]
        self._arrays["cross_fills"][: len(fills)] = fills
        self._arrays["cross_fill_slots"][: sum(map(len, slots))] = np.concatenate(slots)
        return len(fills)


class DraftWriter:
    """Writes the inputs that a multi-token predictor reads after a step."""

    def __init__(self, inputs: StepInputs, features: EncoderCache) -> None:
        self.inputs = inputs
        self.features = features
        self._tokens = TokenWriter(inputs)

    def write(self, draft_inputs: Items[DraftInput]) -> None:
        arrays, count = self.inputs.arrays, len(draft_inputs)
        num_tokens = self._tokens.write(draft_inputs)
        rows = last_rows(
            (item.num_tokens for item in draft_inputs), (int(item.num_drafts > 0) for item in draft_inputs)
        )
        arrays["logit_rows"][: len(rows)] = rows
        arrays["draft_first_rows"][:count] = [item.first_row for item in draft_inputs]
        arrays["draft_counts"][:count] = [item.num_drafts for item in draft_inputs]
        arrays["draft_positions"][:count] = [item.stop + item.sequence.position_offset for item in draft_inputs]
        runs = feature_runs(self.features, draft_inputs, ahead=1)
        if runs:
            arrays["feature_runs"][: len(runs)] = runs
        self.inputs.write_header(StepHeader(num_tokens, count, len(rows), len(runs)))


def feature_runs(
    features: EncoderCache, chunks: Items[Chunk | DraftInput], *, ahead: int = 0
) -> list[tuple[int, int, int, int]]:
    """Return the rows of `feature_runs`: features that replace tokens of the chunks.

    With `ahead` 1, those of the tokens that follow each of them. The last of these may belong to a medium that no step
    has asked for yet: the predictor then reads its placeholder.
    """
    runs: list[tuple[int, int, int, int]] = []
    if not any(chunk.sequence.inputs.media for chunk in chunks):
        return runs
    begin = 0
    for chunk in chunks:
        for span in chunk.sequence.feature_spans(chunk.start + ahead, chunk.stop + ahead):
            if not ahead or features.has(span.medium.key):
                first_row = begin + span.start - ahead - chunk.start
                runs.append((features.id_of(span.medium.key), span.first_feature, first_row, span.length))
        begin += chunk.num_tokens
    return runs
