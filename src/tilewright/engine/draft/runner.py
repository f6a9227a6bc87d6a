"""Runs a multi-token predictor: over the tokens of a step, then over its own drafts, one token a pass."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.engine.recorded_steps import MAX_RECORDED_TOKENS, RecordedSteps
from tilewright.engine.sampler import greedy_parameters
from tilewright.engine.step import DraftInput, last_rows
from tilewright.engine.step_inputs import StepHeader, StepInputs
from tilewright.engine.step_limits import StepLimits
from tilewright.engine.step_writer import TokenWriter
from tilewright.layers.batch import MediaRun
from tilewright.models.protocol import Predictor
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.plan import Arena
from tilewright.ops.sample import sample


class DraftRunner:
    """The predictor with the inputs of its passes, at fixed places: small ones are recorded once per shape."""

    def __init__(
        self,
        predictor: Predictor,
        kv_caches: Items[KvCache],
        inputs: StepInputs,
        limits: StepLimits,
        arena: Arena,
        *,
        replay: bool,
    ) -> None:
        self.predictor = predictor
        self.kv_caches = kv_caches
        self.inputs = inputs
        self.replay = replay
        self._writer = TokenWriter(inputs)
        self._hidden = torch.zeros(limits.max_tokens_per_step, predictor.width, dtype=kv_caches[0].data.dtype)
        self._logit_rows = torch.zeros(limits.max_sequences, dtype=torch.int64)
        self._greedy = greedy_parameters(limits.max_sequences)
        self._arena = arena
        self._recorded: RecordedSteps[tuple[Tensor, Tensor]] = RecordedSteps(arena)

    @torch.inference_mode()
    def draft(self, hidden_TD: Tensor, draft_inputs: Items[DraftInput], next_media: Items[MediaRun]) -> list[list[int]]:
        """The drafts that each input asks for, the likeliest token after the other.

        `hidden_TD` are the hidden states of a step. The first pass reads those of the tokens that were kept and leaves
        their keys and values, with `next_media` among the tokens that follow them. Each further pass takes the output
        of the one before for the hidden state of its draft. What that leaves in the pages is written again once the
        token is known.
        """
        drafts: list[list[int]] = [[] for _ in draft_inputs]
        media = next_media
        source = hidden_TD
        rows = [row for item in draft_inputs for row in range(item.first_row, item.first_row + item.num_tokens)]
        going = list(range(len(draft_inputs)))
        while going:
            torch.index_select(source, 0, torch.tensor(rows), out=self._hidden[: len(rows)])
            asking = [index for index in going if len(drafts[index]) < draft_inputs[index].num_drafts]
            logits, source = self._run([draft_inputs[index] for index in going], media)
            if asking:
                greedy = (parameter[: len(asking)] for parameter in self._greedy)
                for index, token_id in zip(asking, sample(logits, *greedy).tolist(), strict=True):
                    drafts[index].append(token_id)
            # The states are those of the rows that asked, in their order.
            rows = [row for row, index in enumerate(asking) if len(drafts[index]) < draft_inputs[index].num_drafts]
            going = [asking[row] for row in rows]
            draft_inputs = _after_drafts(draft_inputs, going, drafts)
            media = ()
        return drafts

    def _run(self, draft_inputs: Items[DraftInput], media: Items[MediaRun]) -> tuple[Tensor, Tensor]:
        """Logits and states of the last row of each input that asks for drafts."""
        num_tokens = self._writer.write(draft_inputs)
        rows = last_rows(
            (item.num_tokens for item in draft_inputs), (int(item.num_drafts > 0) for item in draft_inputs)
        )
        self._logit_rows[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        shape = num_tokens, len(draft_inputs), len(rows)
        if not self.replay or media or num_tokens > MAX_RECORDED_TOKENS:
            with self._arena.use():
                return self._pass(shape, media)
        return self._recorded.run(shape, lambda: self._pass(shape, ()))

    def _pass(self, shape: tuple[int, int, int], media: Items[MediaRun]) -> tuple[Tensor, Tensor]:
        num_tokens, num_sequences, num_rows = shape
        batch = self.inputs.batch(
            StepHeader(num_tokens, num_sequences, num_tokens), self.kv_caches, recorded=self.replay
        )
        batch = replace(batch, logit_rows=self._logit_rows[:num_rows])
        return self.predictor.draft(batch.token_ids_T, self._hidden[:num_tokens], batch, media)


def _after_drafts(draft_inputs: Items[DraftInput], going: Items[int], drafts: Items[list[int]]) -> list[DraftInput]:
    """The inputs of the next pass: those that continue are at the place of their latest draft."""
    moved = list(draft_inputs)
    for index in going:
        stop = draft_inputs[index].stop
        moved[index] = replace(draft_inputs[index], start=stop, stop=stop + 1, token_ids=drafts[index][-1:])
    return moved
