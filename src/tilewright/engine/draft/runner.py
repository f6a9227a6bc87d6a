"""Runs a multi-token predictor: over the tokens of a step, then over its own drafts, one token a pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.run.inputs import StepHeader, StepInputs
from tilewright.engine.run.replay import MAX_RECORDED_TOKENS, RecordedSteps
from tilewright.engine.sample.sampler import greedy_parameters
from tilewright.engine.schedule.step import StepLimits
from tilewright.layers.batch import FeatureRun
from tilewright.models.protocol import Predictor
from tilewright.ops import backend
from tilewright.ops.attention import KvCache
from tilewright.ops.plan import Arena
from tilewright.ops.sample import greedy, sample


class DraftRunner:
    """The predictor with the inputs of its passes in fixed memory: small passes are recorded once per shape.

    The first pass reads `inputs`, which the scheduler's side has written. Each further pass reads the drafts of the
    previous one, and derives its inputs from it.
    """

    def __init__(
        self,
        predictor: Predictor,
        kv_caches: Items[KvCache],
        inputs: StepInputs,
        limits: StepLimits,
        arena: Arena,
        dtype: torch.dtype,
        *,
        replay: bool,
    ) -> None:
        self.predictor = predictor
        self.kv_caches = kv_caches
        self.inputs = inputs
        self.replay = replay
        self._device = backend.place()
        self._further = StepInputs(inputs.layout)
        self._further_passes = [self._further]  # on a device one per pass, as no pass waits for the previous one
        self._hidden = torch.zeros(
            limits.max_tokens_per_step, predictor.width, dtype=dtype, device=self._device.torch_device
        )
        self._greedy = greedy_parameters(limits.max_sequences)
        self._arena = arena
        self._recorded: RecordedSteps[tuple[Tensor, Tensor]] = RecordedSteps(arena)

    @torch.inference_mode()
    def draft(self, hidden_TD: Tensor, next_feature_runs: Items[FeatureRun]) -> list[list[int]]:
        """Return the drafts that each sequence of `inputs` asks for, each the likeliest token after the previous one.

        `hidden_TD` are the hidden states of a step. The first pass reads those of the kept tokens and writes their keys
        and values, with `next_feature_runs` among the tokens that follow them. Each further pass takes the output of
        the previous one as the hidden state of its draft; its keys and values are written again once the token is
        known.
        """
        header, arrays = self.inputs.header, self.inputs.arrays
        wanted: list[int] = arrays["draft_counts"][: header.num_sequences].tolist()
        if not self._device.is_host:
            return self._draft_there(hidden_TD, next_feature_runs, header, wanted)
        drafts: list[list[int]] = [[] for _ in wanted]
        self._select(hidden_TD, self._first_rows(header))
        logits, source = self._run(self.inputs, header, next_feature_runs)
        asking = [index for index, count in enumerate(wanted) if count]
        while asking:
            greedy = (parameter[: len(asking)] for parameter in self._greedy)
            for index, token_id in zip(asking, sample(logits, *greedy).tolist(), strict=True):
                drafts[index].append(token_id)
            # The states are those of the rows in `asking`, in order.
            rows = [row for row, index in enumerate(asking) if len(drafts[index]) < wanted[index]]
            asking = [asking[row] for row in rows]
            if asking:
                self._select(source, rows)
                self._write_further(self._further, np.array(asking), len(drafts[asking[0]]) - 1)
                self._further.arrays["token_ids"][: len(asking)] = [drafts[index][-1] for index in asking]
                logits, source = self._run(self._further, StepHeader(*[len(asking)] * 3))
        return drafts

    def _draft_there(
        self, hidden_TD: Tensor, next_feature_runs: Items[FeatureRun], header: StepHeader, wanted: list[int]
    ) -> list[list[int]]:
        """Return the drafts like `draft`, on a device: they stay there between passes and come back in one copy.

        The number of drafts per sequence is known beforehand, so no pass waits for a result.
        """
        inputs, sources = self.inputs, self._first_rows(header)
        inputs.arrays["hidden_rows"][: len(sources)] = sources
        inputs.send()
        self._take(hidden_TD, inputs, len(sources))
        logits, states = self._run(inputs, header, next_feature_runs)
        asking = [index for index, count in enumerate(wanted) if count]
        drawn: list[Tensor] = []
        askers: list[list[int]] = []
        while asking:
            drawn.append(greedy(logits))
            askers.append(asking)
            rows = [row for row, index in enumerate(asking) if wanted[index] > len(drawn)]
            asking = [asking[row] for row in rows]
            if asking:
                further, header = self._inputs_of_pass(len(drawn) - 1), StepHeader(*[len(asking)] * 3)
                self._write_further(further, np.array(asking), len(drawn) - 1)
                further.arrays["hidden_rows"][: len(rows)] = rows
                further.write_header(header)
                further.send()
                self._take(states, further, len(rows))
                further.tensors["token_ids"][: len(rows)] = drawn[-1][further.tensors["hidden_rows"][: len(rows)]]
                logits, states = self._run(further, header)
        drafts: list[list[int]] = [[] for _ in wanted]
        tokens = iter(self._device.fetch(torch.cat(drawn)).tolist() if drawn else ())
        for index in itertools.chain(*askers):
            drafts[index].append(next(tokens))
        return drafts

    def _inputs_of_pass(self, number: int) -> StepInputs:
        if number == len(self._further_passes):
            self._further_passes.append(StepInputs(self.inputs.layout))
        self._further_passes[number].recycle()
        return self._further_passes[number]

    def _take(self, hidden: Tensor, inputs: StepInputs, count: int) -> None:
        torch.index_select(hidden, 0, inputs.tensors["hidden_rows"][:count], out=self._hidden[:count])

    def _first_rows(self, header: StepHeader) -> list[int]:
        """Return the rows of the step whose hidden states the first pass reads."""
        starts = self.inputs.arrays["query_starts"][: header.num_sequences + 1].tolist()
        first_rows = self.inputs.arrays["draft_first_rows"][: header.num_sequences].tolist()
        lengths = (end - begin for begin, end in pairwise(starts))
        return [row for first, length in zip(first_rows, lengths, strict=True) for row in range(first, first + length)]

    def _select(self, hidden: Tensor, rows: list[int]) -> None:
        torch.index_select(hidden, 0, torch.tensor(rows), out=self._hidden[: len(rows)])

    def _write_further(self, inputs: StepInputs, asking: np.ndarray, num_before: int) -> None:
        """Write the place, page and position of each sequence's latest draft, `num_before` places after the first."""
        count = len(asking)
        first, further, page_size = self.inputs.arrays, inputs.arrays, self.inputs.layout.page_size
        places = first["kv_lengths"][asking].astype(np.int64) + num_before
        num_pages = int(places.max()) // page_size + 1
        table = further["block_table"][:count]
        table[:, :num_pages] = first["block_table"][asking, :num_pages]
        further["positions"][:, :count] = first["draft_positions"][asking] + num_before
        further["slots"][:count] = table[np.arange(count), places // page_size] * page_size + places % page_size
        further["query_starts"][: count + 1] = np.arange(count + 1)
        further["kv_lengths"][:count] = places + 1

    def _run(
        self, inputs: StepInputs, header: StepHeader, feature_runs: Items[FeatureRun] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of the logit rows."""
        if not self.replay or feature_runs or header.num_tokens > MAX_RECORDED_TOKENS:
            with self._arena.use():
                return self._pass(inputs, header, feature_runs)
        # A recorded pass reads the buffers it was recorded with, so each has its own shape.
        shape = int(inputs is self.inputs), header.num_tokens, header.num_sequences, header.num_logit_rows
        return self._recorded.run(shape, lambda: self._pass(inputs, header, ()))

    def _pass(self, inputs: StepInputs, header: StepHeader, feature_runs: Items[FeatureRun]) -> tuple[Tensor, Tensor]:
        batch = inputs.batch(header, self.kv_caches, recorded=self.replay)
        return self.predictor.draft(batch.token_ids_T, self._hidden[: header.num_tokens], batch, feature_runs)
