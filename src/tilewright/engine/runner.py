"""Runs a step: encodes its media, fills its groups, lays its chunks out as a batch, and gives the logits."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tilewright.engine.cross.buffers import CrossBuffers
from tilewright.engine.cross.cache import CrossCache
from tilewright.engine.cross.group import CrossGroup
from tilewright.engine.draft.runner import DraftRunner
from tilewright.engine.media.encoder_cache import EncoderCache
from tilewright.engine.recorded_steps import MAX_RECORDED_TOKENS, RecordedSteps
from tilewright.engine.state.buffers import StateBuffers
from tilewright.engine.step import Chunk, DraftInput, Step, last_rows
from tilewright.engine.step_buffers import StepBuffers, media_runs
from tilewright.engine.step_limits import StepLimits
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.layers.batch import Batch, MediaRun
from tilewright.models.media_batch import MediaBatch
from tilewright.models.protocol import Model, Predictor
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.plan import Arena
from tilewright.types import Medium


class ModelRunner:
    """The model with its pages of keys and values. `replay`: small steps are recorded once per shape and replayed.

    A model with cross-attention has a second set of caches, with the pages of `cross_cache`; one with recurrent
    layers has `states`. With a `predictor`, `draft` tells what may follow; while `keeps_hidden`, steps leave it all the
    hidden states it reads.
    """

    def __init__(
        self,
        model: Model,
        kv_caches: Items[KvCache],
        features: EncoderCache,
        limits: StepLimits,
        *,
        cross_cache: CrossCache | None = None,
        cross_caches: Items[KvCache] = (),
        states: StateBuffers | None = None,
        predictor: Predictor | None = None,
        media_buffer: MediaBuffer | None = None,
        replay: bool = True,
    ) -> None:
        self.model = model
        self.media_buffer = media_buffer
        self.kv_caches = kv_caches
        self.features = features
        self.cross_cache = cross_cache
        self.cross_caches = cross_caches
        self.states = states
        self.replay = replay
        page_size, num_pages = kv_caches[0].page_size, kv_caches[0].num_pages
        self._buffers = StepBuffers(model.num_position_axes, limits, page_size, num_pages, recorded=replay)
        self._cross: CrossBuffers | None = None
        if cross_cache:
            self._cross = CrossBuffers(limits.max_tokens_per_step, cross_cache, cross_caches, recorded=replay)
        self._arena = Arena()
        self._recorded: RecordedSteps[tuple[Tensor, Tensor | None]] = RecordedSteps(self._arena)
        self.predictor = predictor
        self.keeps_hidden = False
        self._hidden: Tensor | None = None  # of the last step's tokens, until the arena is used again
        self._drafts: DraftRunner | None = None
        if predictor is not None:
            self._drafts = DraftRunner(model, predictor, kv_caches, features, limits, self._arena, replay=replay)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """fp32 logits [R, V]: the rows the chunks ask for, in order. They are overwritten by the next step."""
        if step.encode:
            self.encode(step.encode)
        if step.cross_groups:
            self._fill(step.cross_groups)
        self._buffers.fill(step.chunks)
        if self.states:
            self.states.fill(step.chunks)
        seen = self._cross.fill(step.chunks) if self._cross else ()
        num_tokens, num_sequences = step.num_tokens, len(step.chunks)
        media = media_runs(self.model, self.features, step.chunks)
        wants_all = step.num_logits == num_tokens
        logit_rows = None if wants_all else _logit_rows(step.chunks)
        if self.replay and wants_all and not media and num_tokens <= MAX_RECORDED_TOKENS:
            # The numbers of tokens and sequences, then those of tokens and spans that see something.
            shape = num_tokens, num_sequences, *seen
            logits, self._hidden = self._recorded.run(
                shape, lambda: self._forward(self._batch(num_tokens, num_sequences, None, ()))
            )
            return logits
        with self._arena.use():
            logits, self._hidden = self._forward(self._batch(num_tokens, num_sequences, logit_rows, media))
        return logits

    def draft(self, draft_inputs: Items[DraftInput]) -> list[list[int]]:
        """What the predictor thinks follows, as many tokens as each reading asks for, of the step that was run last."""
        assert self._drafts is not None and self._hidden is not None, "the last step kept no hidden states"
        drafts = self._drafts.draft(self._hidden, draft_inputs)
        self._hidden = None  # their memory is the drafts' now
        return drafts

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits, and all hidden states if they are kept, or computed anyway, for a predictor."""
        if self.predictor is None or (batch.logit_rows is not None and not self.keeps_hidden):
            return self.model.forward(batch), None
        return self.predictor.forward_with_hidden(batch)

    @torch.inference_mode()
    def encode(self, media: Items[Medium]) -> None:
        """Puts the features of the media into the cache: those of all of them from one pass of the encoder."""
        if not media:
            return
        assert self.media_buffer is not None, "a model that takes media has a buffer for them"
        for medium in media:
            self.media_buffer.load(medium.region)
        with self._arena.use():
            batch = MediaBatch.of(self.media_buffer.rows, media)
            for medium, features in zip(media, self.model.encode(batch), strict=True):
                self.features.put(medium.key, features)

    def _fill(self, groups: Items[CrossGroup]) -> None:
        """Writes the keys and values of groups whose media are encoded to their pages."""
        if not groups or self.cross_cache is None:
            return
        with self._arena.use():
            for group in groups:
                slots = torch.from_numpy(self.cross_cache.slots(group.key, group.num_states))
                sizes = [medium.num_states for medium in group.media]
                for medium, places in zip(group.media, slots.split(sizes), strict=True):
                    self.model.store_cross_states(self.features.get(medium.key), places, self.cross_caches)
                self.cross_cache.fill(group.key)

    def _batch(self, num_tokens: int, num_sequences: int, logit_rows: Tensor | None, media: Items[MediaRun]) -> Batch:
        cross = self._cross.batch(num_tokens) if self._cross else None
        states = self.states.batch(num_tokens, num_sequences) if self.states else None
        return self._buffers.batch(num_tokens, num_sequences, self.kv_caches, logit_rows, media, cross, states)


def _logit_rows(chunks: Items[Chunk]) -> Tensor:
    rows = last_rows((chunk.num_tokens for chunk in chunks), (chunk.num_logits for chunk in chunks))
    return torch.tensor(rows, dtype=torch.int64)
