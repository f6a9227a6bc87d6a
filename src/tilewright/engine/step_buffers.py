"""What a step of the model, or of its predictor, reads: rows of tokens and where their keys are, at fixed places."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.media.encoder_cache import EncoderCache
from tilewright.engine.step import Chunk, DraftInput
from tilewright.engine.step_limits import StepLimits
from tilewright.layers.batch import Batch, CrossBatch, MediaRun, StateBatch
from tilewright.models.protocol import Model
from tilewright.ops.kv_cache import KvCache


class StepBuffers:
    """The inputs of every step, at fixed places: a recorded step reads them again. Filled through numpy.

    Where steps are not `recorded`, a batch has only the columns of the block table that its sequences need: the torch
    backend gathers the pages of all of them.
    """

    def __init__(
        self, num_axes: int, limits: StepLimits, page_size: int, num_pages: int, *, recorded: bool = True
    ) -> None:
        self.page_size = page_size
        self.recorded = recorded
        max_tokens, max_sequences = limits.max_tokens_per_step, limits.max_sequences
        pages_per_sequence = min(num_pages, -(-limits.max_context // page_size))
        self.token_ids = torch.zeros(max_tokens, dtype=torch.int64)
        self.positions = torch.zeros(num_axes, max_tokens, dtype=torch.int64)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64)
        self.query_starts = torch.zeros(max_sequences + 1, dtype=torch.int32)
        self.kv_lengths = torch.zeros(max_sequences, dtype=torch.int32)
        self.block_table = torch.zeros(max_sequences, pages_per_sequence, dtype=torch.int32)
        self._token_ids, self._positions, self._slots = (
            self.token_ids.numpy(),
            self.positions.numpy(),
            self.slots.numpy(),
        )
        self._query_starts, self._kv_lengths = self.query_starts.numpy(), self.kv_lengths.numpy()
        self._block_table = self.block_table.numpy()
        self._numbers = np.arange(max_tokens)
        self._pages: list[list[int]] = [[] for _ in range(max_sequences)]  # what rows of the block table begin with
        self._num_columns = pages_per_sequence

    def fill(self, chunks: Items[Chunk | DraftInput]) -> None:
        num_sequences = len(chunks)
        token_ids: list[int] = []
        for index, chunk in enumerate(chunks):
            token_ids += chunk.token_ids
            pages = chunk.sequence.pages
            if self._pages[index] != pages:  # in a step that decodes they are as they were, but for one page in 64
                self._pages[index] = pages.copy()
                self._block_table[index, : len(pages)] = pages
        if not self.recorded:
            self._num_columns = max(len(chunk.sequence.pages) for chunk in chunks)
        num_tokens = len(token_ids)
        lengths, stops, offsets = np.array(
            [(chunk.num_tokens, chunk.stop, chunk.sequence.position_offset) for chunk in chunks]
        ).T
        ends = lengths.cumsum()
        rows = self._numbers[:num_sequences].repeat(lengths)
        places = self._numbers[:num_tokens] + (stops - ends)[rows]
        page_starts = self._block_table[rows, places // self.page_size] * self.page_size
        self._token_ids[:num_tokens] = token_ids
        self._positions[:, :num_tokens] = places + offsets[rows]
        self._slots[:num_tokens] = page_starts + places % self.page_size
        self._query_starts[1 : num_sequences + 1] = ends
        self._kv_lengths[:num_sequences] = stops
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            if chunk.start < chunk.sequence.num_prompt_tokens:  # as the prompt has them
                self._positions[:, end - chunk.num_tokens : end] = chunk.sequence.positions(chunk.start, chunk.stop)

    def batch(
        self,
        num_tokens: int,
        num_sequences: int,
        kv_caches: Items[KvCache],
        logit_rows: Tensor | None,
        media: Items[MediaRun] = (),
        cross: CrossBatch | None = None,
        states: StateBatch | None = None,
    ) -> Batch:
        """The first `num_tokens` tokens of `num_sequences` sequences, as views."""
        return Batch(
            token_ids_T=self.token_ids[:num_tokens],
            positions_AT=self.positions[:, :num_tokens],
            slots_T=self.slots[:num_tokens],
            query_starts=self.query_starts[: num_sequences + 1],
            kv_lengths=self.kv_lengths[:num_sequences],
            block_table=self.block_table[:num_sequences, : self._num_columns],
            kv_caches=kv_caches,
            logit_rows=logit_rows,
            media=media,
            cross=cross,
            states=states,
        )


def media_runs(
    model: Model, features: EncoderCache, chunks: Items[Chunk | DraftInput], *, ahead: int = 0
) -> list[MediaRun]:
    """The features that stand in for tokens of the chunks, as views of what the encoder made.

    `ahead` 1: for the tokens that follow each of them. The one after the last may be of a medium that no step has asked
    for yet: it goes by its placeholder then.
    """
    runs: list[MediaRun] = []
    if not any(chunk.sequence.inputs.media for chunk in chunks):
        return runs
    begin = 0
    for chunk in chunks:
        for run in chunk.sequence.features_in(chunk.start + ahead, chunk.stop + ahead):
            if ahead and not features.has(run.medium.key):
                continue
            found = features.get(run.medium.key)[run.first_feature : run.first_feature + run.length]
            first = begin + run.start - ahead - chunk.start
            runs.append(MediaRun(torch.arange(first, first + run.length), *model.split_features(found)))
        begin += chunk.num_tokens
    return runs
