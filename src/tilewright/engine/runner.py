"""Runs a step: encodes its media, fills its scenes, lays its chunks out as a batch, and gives the logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.cross_buffers import CrossBuffers
from tilewright.engine.feature_cache import FeatureCache
from tilewright.engine.limits import Limits
from tilewright.engine.scene import Scene
from tilewright.engine.scene_cache import SceneCache
from tilewright.engine.state_buffers import StateBuffers
from tilewright.engine.step import Chunk, Step, last_rows
from tilewright.layers.batch import Batch, CrossBatch, MediaRun, StateBatch
from tilewright.models.protocol import Model
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.plan import Arena, Plan
from tilewright.types import Medium

# Python's share of a step is some 2 ms whatever its size: above so many tokens a step takes a hundred times that.
MAX_RECORDED_TOKENS = 64
# A plan is some 300 calls of a few hundred bytes, so this is a bound on clutter rather than on memory.
MAX_PLANS = 128


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

    def fill(self, chunks: Items[Chunk]) -> None:
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
        media: Items[MediaRun],
        cross: CrossBatch | None,
        states: StateBatch | None,
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


@dataclass(frozen=True)
class RecordedStep:
    plan: Plan
    logits: Tensor


class Runner:
    """The model with its pages of keys and values. `replay`: small steps are recorded once per shape and replayed.

    A model with cross-attention has a second set of caches, with the pages of `scenes`; one with recurrent
    layers has `states`.
    """

    def __init__(
        self,
        model: Model,
        kv_caches: Items[KvCache],
        features: FeatureCache,
        limits: Limits,
        *,
        scenes: SceneCache | None = None,
        cross_caches: Items[KvCache] = (),
        states: StateBuffers | None = None,
        replay: bool = True,
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.features = features
        self.scenes = scenes
        self.cross_caches = cross_caches
        self.states = states
        self.replay = replay
        page_size, num_pages = kv_caches[0].page_size, kv_caches[0].num_pages
        self._buffers = StepBuffers(model.num_position_axes, limits, page_size, num_pages)
        self._cross = CrossBuffers(limits.max_tokens_per_step, scenes, cross_caches) if scenes else None
        self._arena = Arena()
        self._recorded: OrderedDict[tuple[int, ...], RecordedStep] = OrderedDict()

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """fp32 logits [R, V]: the rows the chunks ask for, in order. They are overwritten by the next step."""
        self.encode(step.encode)
        self._fill(step.scenes)
        self._buffers.fill(step.chunks)
        if self.states:
            self.states.fill(step.chunks)
        seen = self._cross.fill(step.chunks) if self._cross else ()
        num_tokens, num_sequences = step.num_tokens, len(step.chunks)
        media = self._media_runs(step.chunks)
        wants_all = step.num_logits == num_tokens
        if self.replay and wants_all and not media and num_tokens <= MAX_RECORDED_TOKENS:
            return self._run_recorded((num_tokens, num_sequences, *seen))
        logit_rows = None if wants_all else _logit_rows(step.chunks)
        with self._arena.use():
            return self.model.forward(self._batch(num_tokens, num_sequences, logit_rows, media))

    @torch.inference_mode()
    def encode(self, media: Items[Medium]) -> None:
        """Puts the features of the media into the cache: those of all of them from one pass of the encoder."""
        if not media:
            return
        with self._arena.use():
            for medium, features in zip(media, self.model.encode(media), strict=True):
                self.features.put(medium.key, features)

    def _fill(self, scenes: Items[Scene]) -> None:
        """Writes the keys and values of scenes whose media are encoded to their pages."""
        if not scenes or self.scenes is None:
            return
        with self._arena.use():
            for scene in scenes:
                slots = torch.from_numpy(self.scenes.slots(scene.key, scene.num_states))
                sizes = [medium.num_states for medium in scene.media]
                for medium, places in zip(scene.media, slots.split(sizes), strict=True):
                    self.model.decoder.store_states(self.features.get(medium.key), places, self.cross_caches)
                self.scenes.fill(scene.key)

    def _batch(self, num_tokens: int, num_sequences: int, logit_rows: Tensor | None, media: Items[MediaRun]) -> Batch:
        cross = self._cross.batch(num_tokens) if self._cross else None
        states = self.states.batch(num_tokens, num_sequences) if self.states else None
        return self._buffers.batch(num_tokens, num_sequences, self.kv_caches, logit_rows, media, cross, states)

    def _run_recorded(self, shape: tuple[int, ...]) -> Tensor:
        """`shape` is the numbers of tokens and sequences, then those of tokens and spans that see something."""
        recorded = self._recorded.get(shape)
        if recorded is not None:
            self._recorded.move_to_end(shape)
            recorded.plan.replay()
            return recorded.logits
        plan = Plan(self._arena)
        with plan.record():
            logits = self.model.forward(self._batch(shape[0], shape[1], None, ()))
        self._recorded[shape] = RecordedStep(plan, logits)
        if len(self._recorded) > MAX_PLANS:
            self._recorded.popitem(last=False)
        return logits

    def _media_runs(self, chunks: Items[Chunk]) -> list[MediaRun]:
        """The features that stand in for tokens of the chunks, as views of what the encoder made."""
        runs = []
        begin = 0
        for chunk in chunks:
            for run in chunk.sequence.features_in(chunk.start, chunk.stop):
                features = self.features.get(run.medium.key)[run.first_feature : run.first_feature + run.length]
                first = begin + run.start - chunk.start
                runs.append(MediaRun(torch.arange(first, first + run.length), *self.model.split_features(features)))
            begin += chunk.num_tokens
        return runs


def _logit_rows(chunks: Items[Chunk]) -> Tensor:
    rows = last_rows((chunk.num_tokens for chunk in chunks), (chunk.num_logits for chunk in chunks))
    return torch.tensor(rows, dtype=torch.int64)
