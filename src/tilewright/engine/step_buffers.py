"""What a step of the model, or of its predictor, reads: rows of tokens and where their keys are, at fixed places."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.feature_cache import FeatureCache
from tilewright.engine.limits import Limits
from tilewright.engine.step import Chunk, Reading
from tilewright.layers.batch import Batch, CrossBatch, MediaRun, StateBatch
from tilewright.models.protocol import Model
from tilewright.ops.kv_cache import KvCache


class StepBuffers:
    """The inputs of every step, at fixed places: a recorded step reads them again. Filled through numpy."""

    def __init__(self, num_axes: int, limits: Limits, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
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

    def fill(self, chunks: Items[Chunk | Reading]) -> None:
        begin = 0
        for index, chunk in enumerate(chunks):
            end = begin + chunk.num_tokens
            pages = self._block_table[index, : len(chunk.sequence.pages)]
            pages[:] = chunk.sequence.pages
            places = np.arange(chunk.start, chunk.stop)
            self._token_ids[begin:end] = chunk.token_ids
            self._positions[:, begin:end] = chunk.sequence.positions(chunk.start, chunk.stop)
            self._slots[begin:end] = pages[places // self.page_size] * self.page_size + places % self.page_size
            self._query_starts[index + 1] = end
            self._kv_lengths[index] = chunk.stop
            begin = end

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
            block_table=self.block_table[:num_sequences],
            kv_caches=kv_caches,
            logit_rows=logit_rows,
            media=media,
            cross=cross,
            states=states,
        )


def media_runs(
    model: Model, features: FeatureCache, chunks: Items[Chunk | Reading], *, ahead: int = 0
) -> list[MediaRun]:
    """The features that stand in for tokens of the chunks, as views of what the encoder made.

    `ahead` 1: for the tokens that follow each of them. The one after the last may be of a medium that no step has asked
    for yet: it goes by its placeholder then.
    """
    runs = []
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
