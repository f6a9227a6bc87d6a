"""Runs a step given as plain data: encodes its media, fills cross-attention pages and returns the logits.

Its settings are plain data too, so that every rank makes the same runner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.draft.runner import DraftRunner
from tilewright.engine.kv.pages import PAGE_SIZE, kv_byte_dtype
from tilewright.engine.kv.state import StateMemory
from tilewright.engine.media.transfer import MediaTransfer
from tilewright.engine.run.inputs import StepHeader, StepInputs, StepLayout, read_encoded_row
from tilewright.engine.run.replay import MAX_RECORDED_TOKENS, CapturedSteps, RecordedSteps
from tilewright.engine.schedule.step import StepLimits
from tilewright.layers.batch import Batch, FeatureRun, WantedStates
from tilewright.models.protocol import MediaBatch, MediaItem, Model, Predictor
from tilewright.ops import backend
from tilewright.ops.attention import KvCache
from tilewright.ops.plan import Arena


@dataclass(frozen=True)
class RunnerSettings:
    """Sizes of the memory that sequences share, and options for running steps."""

    limits: StepLimits
    num_pages: int
    num_cross_pages: int = 0  # for encoder states; 0 in models without cross-attention
    num_state_slots: int = 0  # 0 in models without recurrent layers
    num_window_pages: tuple[int, ...] = ()  # of layers with a sliding window, the shortest window first
    page_size: int = PAGE_SIZE
    drafting: bool = False
    kv_cache_dtype: str = "auto"
    replay: bool = True

    def layout(self, model: Model) -> StepLayout:
        """Return the layout of steps in a buffer."""
        return StepLayout(
            self.limits,
            num_axes=model.num_position_axes,
            page_size=self.page_size,
            num_pages=self.num_pages,
            num_cross_pages=self.num_cross_pages,
            window_pages=self.window_pages(model),
        )

    def window_pages(self, model: Model) -> dict[int, int]:
        """Return how many pages layers with a sliding window share, by window."""
        windows = model.kv_spec.windows(self.limits.max_context)
        return dict(zip(windows, self.num_window_pages, strict=True))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RunnerSettings:
        own = {"limits": StepLimits(**fields["limits"]), "num_window_pages": tuple(fields["num_window_pages"])}
        return RunnerSettings(**{**fields, **own})


def build_runner(
    model: Model,
    dtype: torch.dtype,
    settings: RunnerSettings,
    inputs: StepInputs,
    draft_inputs: StepInputs,
    media_rows: Tensor | None,
) -> ModelRunner:
    """Return a runner with fresh memory for a loaded model; it reads its steps from the inputs."""

    kv_dtype, cross_spec = kv_byte_dtype(settings.kv_cache_dtype) or dtype, model.cross_spec
    # One page more, always zero, stands for the pages before a window.
    window_pages = {window: count + 1 for window, count in settings.window_pages(model).items()}
    cross_caches: list[KvCache] = []
    if cross_spec is not None:
        cross_caches = cross_spec.empty_caches(settings.num_cross_pages, settings.page_size, kv_dtype)
    return ModelRunner(
        model,
        model.kv_spec.empty_caches(settings.num_pages, settings.page_size, kv_dtype, window_pages),
        inputs,
        settings.limits,
        cross_caches=cross_caches,
        states=StateMemory(model.state_spec, settings.num_state_slots, dtype) if model.state_spec else None,
        predictor=model.predictor if settings.drafting else None,
        draft_inputs=draft_inputs,
        dtype=dtype,
        media_rows=media_rows,
        replay=settings.replay,
    )


# Most media rows of a recorded encoder pass: 16 images of 512 x 512. Larger passes keep a GPU busy anyway.
MAX_CAPTURED_MEDIA_ROWS = 16384
# Sequences of a recorded step on a device; a step with fewer is padded to the next of these.
CAPTURED_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class ModelRunner:
    """The model with its memory: KV pages, encoder features, recurrent states. It reads steps from `inputs`.

    `replay`: small steps are recorded once per shape and replayed; on a device, those in which all sequences decode. A
    model with cross-attention has a second set of caches, one with recurrent layers has `states`. With a `predictor`,
    `draft` drafts tokens after a step, from `draft_inputs`. `dtype` is that of hidden states; None: that of keys and
    values.
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
        self.device = backend.place()  # where its weights, pages and states are
        self._is_host = self.device.is_host
        # Copies from the media buffer, [rows, width]; None: the model takes no media.
        self._media = None if media_rows is None else MediaTransfer(media_rows, self.device)
        self.kv_caches = kv_caches
        self.inputs = inputs
        self.cross_caches = cross_caches
        self.states = states
        self.replay = replay
        self.features: dict[int, Tensor] = {}  # by the scheduler's ids
        self._arena = Arena()
        self._recorded: RecordedSteps[tuple[Tensor, Tensor | None]] = RecordedSteps(self._arena)
        self._captured_passes: CapturedSteps[list[Tensor]] = CapturedSteps(self.device, "passes of the encoder")
        self._captured: CapturedSteps[tuple[Tensor, Tensor | None]] = CapturedSteps(self.device, "steps")
        self._max_rows = min(limits.max_sequences, limits.max_tokens_per_step)
        self.predictor = predictor
        self._hidden: Tensor | None = None  # of the last step's tokens, valid until the arena is used again
        self._drafts: DraftRunner | None = None
        if predictor is not None:
            draft_inputs = draft_inputs or StepInputs(inputs.layout)
            self._drafts = DraftRunner(
                predictor,
                kv_caches,
                draft_inputs,
                limits,
                self._arena,
                dtype or kv_caches[0].dtype,
                replay=replay and self.device.is_host,
            )

    @property
    def scratch_bytes(self) -> int:
        """Bytes for results of ops: those of the largest step so far, and those reserved in advance."""
        return self._arena.size_bytes

    @property
    def draft_inputs(self) -> StepInputs | None:
        """Inputs that `draft` reads; None: the model has no predictor."""
        return None if self._drafts is None else self._drafts.inputs

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Run the step in `inputs` and return its logits, fp32 [R, V]. The next step overwrites them."""
        header = self.inputs.header
        is_captured = self._can_capture(header)
        padded = self._pad(header) if is_captured else header
        self._prepare(header)
        if not header.num_tokens:
            return torch.empty(0, self.model.vocab_size)
        if is_captured:
            logits, self._hidden = self._captured.run(self._captured_shape(padded), lambda: self._forward(padded, True))
            return logits[: header.num_tokens]
        is_small = header.num_tokens <= MAX_RECORDED_TOKENS and header.needs_all_logits
        if self._is_recorded and is_small and not header.num_feature_runs:
            shape = header.num_tokens, header.num_sequences, header.num_cross_rows, header.num_cross_spans
            logits, self._hidden = self._recorded.run(shape, lambda: self._forward(header, True))
            return logits
        with self._arena.use():
            logits, self._hidden = self._forward(header, self._is_recorded)
        return logits

    @torch.inference_mode()
    def run_with_states(self, wanted: WantedStates) -> tuple[Tensor, Tensor]:
        """Run the step in `inputs` op by op; return its logits, and the hidden states that are wanted [M, D]."""
        header = self.inputs.header
        self._prepare(header)
        self._hidden = None
        with self._arena.use():
            return self.model.forward_with_states(self._batch(header, self._is_recorded), wanted)

    @property
    def _is_recorded(self) -> bool:
        """Whether steps of the host are recorded."""
        return self.replay and self._is_host

    def _prepare(self, header: StepHeader) -> None:
        """Send the step to a device, and compute the features and the cross-attention pages that it reads."""
        if not self._is_host:
            self.inputs.send()
        if header.num_dropped:
            for feature_id in self.inputs.arrays["dropped_ids"][: header.num_dropped].tolist():
                self.features.pop(feature_id, None)
        if header.num_encoded:
            self._encode(header)
        if header.num_cross_fills:
            self._fill(header.num_cross_fills)

    def _can_capture(self, header: StepHeader) -> bool:
        """Return whether a device records the step: every sequence has one token and nothing else to do."""
        is_decode = 0 < header.num_tokens == header.num_sequences and header.needs_all_logits
        is_plain = is_decode and not header.num_feature_runs and header.num_sequences <= CAPTURED_SEQUENCES[-1]
        return is_plain and self.replay and not self._is_host

    def _pad(self, header: StepHeader) -> StepHeader:
        """Pad the step to the sequences of a recorded one; return it unchanged if tokens attend to encoder states."""
        if header.num_cross_spans:
            return header
        size = next(size for size in CAPTURED_SEQUENCES if size >= header.num_sequences)
        return self.inputs.pad(header, min(size, self._max_rows))

    def _captured_shape(self, header: StepHeader) -> tuple[int, ...]:
        num_pages = self.inputs.num_pages(header, recorded=True)
        if not header.num_cross_spans:
            return header.num_sequences, num_pages
        of_cross = header.num_cross_rows, header.num_cross_spans, self.inputs.num_cross_pages(header, recorded=True)
        return header.num_sequences, num_pages, *of_cross

    def recycle(self) -> None:
        """Return when `inputs` and the media read from the buffer may be overwritten: their copies are done."""
        self.inputs.recycle()
        if self._media is not None:
            self._media.recycle()

    def send_ahead(self, items: Items[MediaItem]) -> bool:
        """Start copying media of a later step; return False if they are copied with that step instead."""
        return self._media is not None and self._media.send_ahead(items)

    def draft(self) -> list[list[int]]:
        """Return the predictor's drafts after the last step, for each sequence in `draft_inputs`."""
        assert self._drafts is not None and self._hidden is not None, "the last step kept no hidden states"
        drafts = self._drafts.draft(self._hidden, self._feature_runs(self._drafts.inputs))
        self._hidden = None  # the drafts use this memory from now on
        return drafts

    def _encode(self, header: StepHeader) -> None:
        """Store the features of media under their ids: from one pass of the encoder, or as sent with the request."""
        assert self._media is not None, "a model that takes media has a buffer for them"
        media = [read_encoded_row(row) for row in self.inputs.arrays["encoded"][: header.num_encoded].tolist()]
        is_captured = self.replay and not self._is_host
        limit = MAX_CAPTURED_MEDIA_ROWS if is_captured else 0
        items = [item for _, item in media]
        batch = self._media.send(items, ahead=bool(header.media_are_ahead), max_kept_rows=limit)
        to_encode: dict[int, MediaItem] = {}  # by the ids of their features
        for (feature_id, _), item in zip(media, batch.items, strict=True):
            if item.feature_width:
                self.features[feature_id] = batch.features(item)
            else:
                to_encode[feature_id] = item
        if not to_encode:
            return
        unseen = MediaBatch(batch.buffer, tuple(to_encode.values()))
        with self._arena.use():
            if self._media.is_kept(batch):
                # A recording's results have fixed addresses, so they are copied.
                passed = self._captured_passes.run(unseen.items, lambda: self.model.encode(unseen))
                found = [features.clone() for features in passed]
            else:
                found = self.model.encode(unseen)
        self.features |= dict(zip(to_encode, found, strict=True))

    def _forward(self, header: StepHeader, is_recorded: bool) -> tuple[Tensor, Tensor | None]:
        """Return the logits, and all hidden states if a predictor reads them or all were computed anyway."""
        batch = self._batch(header, is_recorded)
        if self.predictor is None or (batch.logit_rows is not None and not header.keeps_hidden):
            return self.model.forward(batch), None
        return self.predictor.forward_with_hidden(batch)

    def _batch(self, header: StepHeader, is_recorded: bool) -> Batch:
        inputs = self.inputs
        feature_runs = self._feature_runs(inputs)
        states = None if self.states is None else self.states.batch(inputs, header)
        cross = inputs.cross_batch(header, self.cross_caches, recorded=is_recorded)
        return inputs.batch(header, self.kv_caches, feature_runs, cross, states, recorded=is_recorded)

    def _fill(self, num_fills: int) -> None:
        """Write the keys and values of encoder states to their cross-attention pages."""
        slots, first = self.inputs.tensors["cross_fill_slots"], 0
        with self._arena.use():
            for feature_id, num_states in self.inputs.arrays["cross_fills"][:num_fills].tolist():
                places = slots[first : first + num_states]
                self.model.store_cross_states(self.features[feature_id], places, self.cross_caches)
                first += num_states

    def _feature_runs(self, inputs: StepInputs) -> list[FeatureRun]:
        """Return the features that replace tokens, as views of the encoder's output."""
        rows = inputs.arrays["feature_runs"][: inputs.header.num_feature_runs].tolist()
        return [
            FeatureRun(
                torch.arange(first_row, first_row + length, device=self.device.torch_device),
                *self.model.split_features(self.features[feature_id][first_feature : first_feature + length]),
            )
            for feature_id, first_feature, first_row, length in rows
        ]
