"""Runs a step that is plain data: encodes its media, fills cross-attention pages, and gives the logits."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.engine.draft.runner import DraftRunner
from tilewright.engine.media.transfer import MediaTransfer
from tilewright.engine.recorded_steps import MAX_RECORDED_TOKENS, RecordedSteps
from tilewright.engine.state.memory import StateMemory
from tilewright.engine.step_inputs import EncodedMedium, FeatureRows, StepHeader, StepInputs
from tilewright.engine.step_limits import StepLimits
from tilewright.layers.batch import Batch, KeptStates, MediaRun
from tilewright.models.protocol import Model, Predictor
from tilewright.ops import backend
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.plan import Arena


class ModelRunner:
    """The model with its memory: KV pages, encoder features, recurrent states. It reads steps from `inputs`.

    `replay`: small steps are recorded once per shape and replayed. A model with cross-attention has a second set of
    caches, one with recurrent layers has `states`. With a `predictor`, `draft` drafts what may follow a step, from what
    is in `draft_inputs`. `dtype` is that of hidden states; None: that of the keys and values.
    """

    def __init__(
        self,
        model: Model,
        kv_caches: Items[KvCache],
        inputs: StepInputs,
        limits: StepLimits,
        *,
        cross_caches: Items[KvCache] = (),
        states: StateMemory | None = None,
        predictor: Predictor | None = None,
        draft_inputs: StepInputs | None = None,
        dtype: torch.dtype | None = None,
        media_rows: Tensor | None = None,
        replay: bool = True,
    ) -> None:
        self.model = model
        self.device = backend.place()  # its own: where its weights, pages and states are
        # From the media buffer, [rows, width]; None: the model takes no media.
        self._media = None if media_rows is None else MediaTransfer(media_rows, self.device)
        self.kv_caches = kv_caches
        self.inputs = inputs
        self.cross_caches = cross_caches
        self.states = states
        self.replay = replay
        self.features: dict[int, Tensor] = {}  # by the id that the scheduler's side gave them
        self._arena = Arena()
        self._recorded: RecordedSteps[tuple[Tensor, Tensor | None]] = RecordedSteps(self._arena)
        self.predictor = predictor
        self.kept: KeptStates | None = None  # of the next step, of tokens that this rank's caller asks for
        self._hidden: Tensor | None = None  # of the last step's tokens, until the arena is used again
        self._drafts: DraftRunner | None = None
        if predictor is not None:
            draft_inputs = draft_inputs or StepInputs(inputs.layout)
            self._drafts = DraftRunner(
                predictor, kv_caches, draft_inputs, limits, self._arena, dtype or kv_caches[0].dtype, replay=replay
            )

    @property
    def scratch_bytes(self) -> int:
        """For results of ops: what the largest step so far took, and what was added in advance."""
        return self._arena.size_bytes

    @property
    def draft_inputs(self) -> StepInputs | None:
        """Where `draft` reads what its predictor is given; None: the model has none."""
        return None if self._drafts is None else self._drafts.inputs

    @torch.inference_mode()
    def run(self) -> Tensor:
        """fp32 logits [R, V] of the rows that the step in `inputs` asks for. They are overwritten by the next step."""
        header = self.inputs.header
        self.inputs.send()
        if header.num_dropped:
            for feature_id in self.inputs.arrays["dropped_ids"][: header.num_dropped].tolist():
                self.features.pop(feature_id, None)
        if header.num_encoded:
            self._encode(header.num_encoded)
        if header.num_cross_fills:
            self._fill(header.num_cross_fills)
        if not header.num_tokens:
            return torch.empty(0, self.model.vocab_size)
        is_small = header.num_tokens <= MAX_RECORDED_TOKENS and header.wants_all_logits
        if self.replay and is_small and not header.num_feature_runs and self.kept is None:
            shape = header.num_tokens, header.num_sequences, header.num_cross_rows, header.num_cross_spans
            logits, self._hidden = self._recorded.run(shape, lambda: self._forward(header))
            return logits
        with self._arena.use():
            logits, self._hidden = self._forward(header)
        return logits

    def recycle(self) -> None:
        """Returns when `inputs` and the media that were read may be written again: copies of them are done."""
        self.inputs.recycle()
        if self._media is not None:
            self._media.recycle()

    def draft(self) -> list[list[int]]:
        """What the predictor drafts after the step that was run last, for each sequence in `draft_inputs`."""
        assert self._drafts is not None and self._hidden is not None, "the last step kept no hidden states"
        drafts = self._drafts.draft(self._hidden, self._media_runs(self._drafts.inputs))
        self._hidden = None  # their memory is the drafts' now
        return drafts

    def _encode(self, count: int) -> None:
        """Keeps the features of media under their ids: those of all of them from one pass of the encoder."""
        assert self._media is not None, "a model that takes media has a buffer for them"
        media = [EncodedMedium(*row) for row in self.inputs.arrays["encoded"][:count].tolist()]
        batch = self._media.send([medium.item for medium in media])
        with self._arena.use():
            for medium, features in zip(media, self.model.encode(batch), strict=True):
                self.features[medium.feature_id] = features

    def _forward(self, header: StepHeader) -> tuple[Tensor, Tensor | None]:
        """Logits, and all hidden states if they are kept, or computed anyway, for a predictor."""
        batch = self._batch(header)
        if self.predictor is None or (batch.logit_rows is not None and not header.keeps_hidden):
            return self.model.forward(batch), None
        return self.predictor.forward_with_hidden(batch)

    def _batch(self, header: StepHeader) -> Batch:
        inputs = self.inputs
        media = self._media_runs(inputs)
        states = None if self.states is None else self.states.batch(inputs, header)
        cross = inputs.cross_batch(header, self.cross_caches, recorded=self.replay)
        batch = inputs.batch(header, self.kv_caches, media, cross, states, recorded=self.replay)
        return batch if self.kept is None else replace(batch, kept=self.kept)

    def _fill(self, num_fills: int) -> None:
        """Writes the keys and values of encoder states to their cross-attention pages."""
        slots, first = self.inputs.tensors["cross_fill_slots"], 0
        with self._arena.use():
            for feature_id, num_states in self.inputs.arrays["cross_fills"][:num_fills].tolist():
                places = slots[first : first + num_states]
                self.model.store_cross_states(self.features[feature_id], places, self.cross_caches)
                first += num_states

    def _media_runs(self, inputs: StepInputs) -> list[MediaRun]:
        """The features that stand in for tokens, as views of what the encoder made."""
        runs = [FeatureRows(*row) for row in inputs.arrays["feature_runs"][: inputs.header.num_feature_runs].tolist()]
        return [
            MediaRun(
                torch.arange(run.first_row, run.first_row + run.length, device=self.device.torch_device),
                *self.model.split_features(
                    self.features[run.feature_id][run.first_feature : run.first_feature + run.length]
                ),
            )
            for run in runs
        ]
