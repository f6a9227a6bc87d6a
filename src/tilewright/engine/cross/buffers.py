"""What a step's tokens see by cross-attention, at fixed places: a recorded step reads it again."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from tilewright.engine.cross.cache import CrossCache
from tilewright.engine.step import Chunk
from tilewright.layers.batch import CrossBatch
from tilewright.ops.kv_cache import KvCache


class CrossBuffers:
    """Spans of tokens, the states each sees and their pages. Filled through numpy; `recorded` as in StepBuffers."""

    def __init__(
        self, max_tokens: int, cross_cache: CrossCache, kv_caches: Items[KvCache], *, recorded: bool = True
    ) -> None:
        self.cross_cache = cross_cache
        self.kv_caches = kv_caches
        self.rows = torch.zeros(max_tokens, dtype=torch.int64)
        self.query_starts = torch.zeros(max_tokens + 1, dtype=torch.int32)
        self.lengths = torch.zeros(max_tokens, dtype=torch.int32)
        # As many spans as tokens, as many pages as there are: most of it is never touched, and takes no memory.
        self.block_table = torch.zeros(max_tokens, cross_cache.num_pages, dtype=torch.int32)
        self._rows, self._query_starts = self.rows.numpy(), self.query_starts.numpy()
        self._lengths, self._block_table = self.lengths.numpy(), self.block_table.numpy()
        self._num_rows = self._num_spans = 0
        self._recorded, self._num_columns = recorded, cross_cache.num_pages

    def fill(self, chunks: Items[Chunk]) -> tuple[int, int]:
        """How many tokens see something, and in how many spans: the part of a step's shape that is ours."""
        self._num_rows = self._num_spans = num_columns = 0
        begin = 0
        for chunk in chunks:
            for cross_span in chunk.sequence.cross_spans(chunk.start, chunk.stop):
                first, count = begin + cross_span.start - chunk.start, cross_span.stop - cross_span.start
                self._rows[self._num_rows : self._num_rows + count] = range(first, first + count)
                self._num_rows += count
                pages = self.cross_cache.pages(cross_span.group.key)
                self._block_table[self._num_spans, : len(pages)] = pages
                num_columns = max(num_columns, len(pages))
                self._lengths[self._num_spans] = cross_span.num_states
                self._num_spans += 1
                self._query_starts[self._num_spans] = self._num_rows
            begin += chunk.num_tokens
        if not self._recorded:
            self._num_columns = num_columns
        return self._num_rows, self._num_spans

    def batch(self, num_tokens: int) -> CrossBatch | None:
        """What was filled in, as views; None where no token sees anything."""
        if not self._num_spans:
            return None
        return CrossBatch(
            rows_R=None if self._num_rows == num_tokens else self.rows[: self._num_rows],
            query_starts=self.query_starts[: self._num_spans + 1],
            lengths=self.lengths[: self._num_spans],
            block_table=self.block_table[: self._num_spans, : self._num_columns],
            kv_caches=self.kv_caches,
        )
