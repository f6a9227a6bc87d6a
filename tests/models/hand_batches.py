"""Batches made by hand, without an engine: pages, states and features of sequences that go on as they are told."""

from __future__ import annotations

from dataclasses import dataclass

import tiny
import torch

from tilewright.engine.schedule.sequence import Sequence
from tilewright.layers.batch import Batch, FeatureRun, StateBatch
from tilewright.models.protocol import MediaBatch
from tilewright.types import ModelInputs, SamplingParams

PAGE_SIZE = 32


@dataclass
class Going:
    """A sequence on its way: its pages lie together, its state has one slot."""

    sequence: Sequence
    slot: int
    num_done: int = 0

    @property
    def num_left(self) -> int:
        return self.sequence.num_tokens - self.num_done


class Hands:
    """Runs chunks of sequences through a model. Fresh memory is NaN: what is read before it is written shows."""

    def __init__(self, model, dtype=torch.float32, *, num_pages: int = 64, num_slots: int = 8) -> None:
        self.model, self.dtype = model, dtype
        spec, states = model.kv_spec, model.state_spec
        self.kv_caches = spec.empty_caches(num_pages, PAGE_SIZE, dtype)
        self.conv_states = [
            torch.full((num_slots, *states.conv_shape), torch.nan, dtype=dtype) for _ in range(states.num_layers)
        ]
        self.delta_states = [torch.full((num_slots, *states.delta_shape), torch.nan) for _ in range(states.num_layers)]
        self.going: list[Going] = []
        self.features: dict[bytes, torch.Tensor] = {}
        self._next_page = 0

    def start(self, inputs: ModelInputs) -> Going:
        sequence = Sequence("request", tiny.in_dtype(inputs, self.dtype), SamplingParams())
        num_pages = -(-sequence.num_tokens // PAGE_SIZE)
        sequence.pages = list(range(self._next_page, self._next_page + num_pages))
        self._next_page += num_pages
        self.going.append(Going(sequence, len(self.going)))
        return self.going[-1]

    def batch(self, chunks: list[tuple[Going, int]], logit_rows: torch.Tensor | None = None) -> Batch:
        """The next tokens of each sequence, so many of each."""
        ids, positions, slots, feature_runs, writes = [], [], [], [], []
        num_before = 0
        for going, count in chunks:
            sequence, begin, end = going.sequence, going.num_done, going.num_done + count
            places = torch.arange(begin, end)
            ids += sequence.token_ids[begin:end]
            positions.append(torch.from_numpy(sequence.positions(begin, end).copy()))
            pages = torch.tensor(sequence.pages)
            slots.append(pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE)
            writes += [-1] * (count - 1) + [going.slot]
            for span in sequence.feature_spans(begin, end):
                features = self._features(span.medium)[span.first_feature : span.first_feature + span.length]
                first = num_before + span.start - begin
                rows = torch.arange(first, first + span.length)
                feature_runs.append(FeatureRun(rows, *self.model.split_features(features)))
            num_before += count
        starts = torch.tensor([0, *(count for _, count in chunks)]).cumsum(0).int()
        table = torch.zeros(len(chunks), max(len(going.sequence.pages) for going, _ in chunks), dtype=torch.int32)
        for row, (going, _) in zip(table, chunks, strict=True):
            row[: len(going.sequence.pages)] = torch.tensor(going.sequence.pages)
        return Batch(
            token_ids_T=torch.tensor(ids),
            positions_AT=torch.cat(positions, dim=1),
            slots_T=torch.cat(slots),
            query_starts=starts,
            kv_lengths=torch.tensor([going.num_done + count for going, count in chunks], dtype=torch.int32),
            block_table=table,
            kv_caches=self.kv_caches,
            logit_rows=logit_rows,
            feature_runs=feature_runs,
            states=StateBatch(
                read_slots=torch.tensor([going.slot if going.num_done else -1 for going, _ in chunks]).int(),
                write_slots=torch.tensor(writes).int(),
                conv_states=self.conv_states,
                delta_states=self.delta_states,
            ),
        )

    @torch.inference_mode()
    def step(self, chunks: list[tuple[Going, int]], logit_rows: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The logits of each chunk; with `logit_rows`, all of those rows as one."""
        logits = self.model.forward(self.batch(chunks, logit_rows))
        for going, count in chunks:
            going.num_done += count
        return [logits] if logit_rows is not None else list(logits.split([count for _, count in chunks]))

    def run(self, inputs: ModelInputs, sizes=(10**9,)) -> torch.Tensor:
        """Logits [T, V] of a prompt, in chunks of these sizes in turn."""
        going, rows, turn = self.start(inputs), [], 0
        while going.num_left:
            rows += self.step([(going, min(sizes[turn % len(sizes)], going.num_left))])
            turn += 1
        return torch.cat(rows)

    def _features(self, medium) -> torch.Tensor:
        if medium.key not in self.features:
            batch = MediaBatch.of(tiny.media_buffer(self.dtype).rows, [medium])
            (self.features[medium.key],) = self.model.encode(batch)
        return self.features[medium.key]
