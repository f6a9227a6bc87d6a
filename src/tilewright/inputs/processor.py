"""Turns messages or prompts, with or without media, into a model's inputs; the part that all families share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from tilewright.inputs.chat_ids import ChatEncoder
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.isolation.opener import Opener
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.inputs.media_buffer import Allocation, MediaBuffer, Write
from tilewright.inputs.messages import TextBudget, media_of_prompt, normalize
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import PreparedValues, ValueSizes
from tilewright.inputs.precomputed_values import prepare as prepare_values
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import MediaKind, Medium, Messages, ModelInputs, Region, RequestError, Span


class TextProcessor:
    """Turns requests of text into `ModelInputs`, and refuses images, videos and sounds."""

    accepts: Sequence[MediaKind] = ()
    image_token_ids: tuple[int, ...] = ()
    media_buffer = None

    def __init__(
        self, name: str, tokenizer: Tokenizer, template: ChatTemplate | None, missing: str | None = None
    ) -> None:
        """`missing` is the error for images and videos if the model lacks a component for them."""
        self.name = name
        self._missing = missing
        self.tokenizer = tokenizer
        self.template = template
        self._encoder = None if template is None else ChatEncoder(template, tokenizer)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[object] | None = None,
        is_known: Callable[[bytes], bool] | None = None,
        budget: TextBudget | None = None,
        use_audio_in_video: bool = False,
        **template_args: Any,
    ) -> ModelInputs:
        """Return the inputs of a conversation, up to the model's answer."""
        if self._encoder is None:
            raise RequestError(f"{self.name} has no chat template: send a prompt instead")
        normalized, _ = normalize(messages, accepts=self.accepts, model=self.name, missing=self._missing)
        for message in normalized:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        return _inputs(*self._encoder.encode(normalized, tools=tools, budget=budget, **template_args))

    def prompt(
        self,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Mapping[str, object]] = (),
        *,
        is_known: Callable[[bytes], bool] | None = None,
        budget: TextBudget | None = None,
    ) -> ModelInputs:
        """Return the inputs of a text, after the tokenizer's beginning-of-text, or of token ids, unchanged."""
        media_of_prompt(media, accepts=self.accepts, model=self.name, missing=self._missing)
        return _inputs(prompt_ids(self.tokenizer, text, token_ids, budget))


def prompt_ids(
    tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int] | None, budget: TextBudget | None
) -> list[int]:
    """Return the ids of a text, with the tokenizer's beginning-of-text, or the given ids; exactly one must be given.

    Negative ids are refused here; the engine checks that the model has them all.
    """
    if (text is None) == (token_ids is None):
        raise RequestError("expected either a text or token ids")
    if text is not None:
        return tokenizer.encode(text, add_special_tokens=True, budget=budget)
    ids = [index(token_id) for token_id in (() if token_ids is None else token_ids)]
    if any(token_id < 0 for token_id in ids):
        raise RequestError(f"token id {min(ids)}, expected 0 or more")
    return ids


def _inputs(ids: Sequence[int], is_reasoning: bool = False) -> ModelInputs:
    positions = np.arange(len(ids), dtype=np.int64)[None]
    return ModelInputs(tuple(ids), positions, len(ids), opens_reasoning=is_reasoning)


IsKnown = Callable[[bytes], bool]


@dataclass(frozen=True)
class PreparedMedium:
    """A medium that a model's processor has opened: its key and its sizes are known.

    It has no place in the prompt yet, nor in the media buffer, and is not decoded. `placed` makes a Medium of it.
    """

    name: str  # for errors: "image 2"
    kind: MediaKind
    key: bytes
    grid: tuple[int, int, int]
    num_rows: int  # of the media buffer
    encoder_rows: int
    write: Write
    times_s: tuple[float, ...] = ()  # of each group of a video's frames
    sound: tuple[PreparedMedium, ...] = ()  # a video's sound, or the separately encoded pieces of a sound
    num_states: int = 0
    tiling: tuple[int, int] = (1, 1)
    feature_width: int = 0  # of the request's features; 0: the encoder computes them

    def placed(self, spans: tuple[Span, ...], region: Region) -> Medium:
        """Return the medium in its places: tokens of the prompt, and rows of the media buffer."""
        return Medium(
            kind=self.kind,
            key=self.key,
            grid=self.grid,
            spans=spans,
            region=region,
            encoder_rows=self.encoder_rows,
            num_states=self.num_states,
            tiling=self.tiling,
            feature_width=self.feature_width,
        )


@dataclass(frozen=True)
class Placement:
    """A prompt with the placeholder tokens of its media expanded."""

    token_ids: Sequence[int]
    positions: np.ndarray
    next_position: int
    media: Sequence[tuple[PreparedMedium, tuple[Span, ...]]]


class MediaProcessor(ABC):
    """Turns requests into `ModelInputs`. Thread-safe.

    `is_known` returns whether a key's encoder output is cached: then the medium is not decoded. `budget` bounds the
    text that is tokenized.
    """

    accepts: Sequence[MediaKind]

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: MediaLimits | None,
        opener: Opener | None,
        media_buffer: MediaBuffer,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._encoder = None if template is None else ChatEncoder(template, tokenizer)
        self.limits = limits or MediaLimits()
        self.opener = opener or Opener()
        self.media_buffer = media_buffer

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[object] | None = None,
        is_known: IsKnown | None = None,
        budget: TextBudget | None = None,
        use_audio_in_video: bool = False,
        **template_args: Any,
    ) -> ModelInputs:
        """Return the inputs of a conversation, up to the model's answer.

        `use_audio_in_video` reads the sound of videos too, unless a video sets it otherwise.
        """
        if self._encoder is None:
            raise RequestError("the model has no chat template: send a prompt instead")
        normalized, parts = normalize(
            messages,
            limits=self.limits,
            accepts=self.accepts,
            use_audio_in_video=use_audio_in_video,
        )
        ids, opens_reasoning = self._encoder.encode(normalized, tools=tools, budget=budget, **template_args)
        inputs = self._inputs(ids, parts, is_known, budget)
        return dataclasses.replace(inputs, opens_reasoning=opens_reasoning)

    def prompt(
        self,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Mapping[str, object]] = (),
        *,
        is_known: IsKnown | None = None,
        budget: TextBudget | None = None,
    ) -> ModelInputs:
        """Return the inputs of a text, or of token ids, with one placeholder token per medium.

        Media have the form of message parts: {"type": "image", "image": source}, {"type": "video", "video": source,
        "fps": of frames}. Media of a kind belong to the placeholders of that kind, in order.
        """
        ids = self._prompt_ids(text, token_ids, budget)
        parts = media_of_prompt(media, limits=self.limits, accepts=self.accepts)
        return self._inputs(ids, parts, is_known, budget)

    def describe(self, medium: Mapping[str, object]) -> PreparedMedium:
        """Return the grid, times and tiles of a medium in the form of a message part, read from its header."""
        (part,) = media_of_prompt([medium], limits=self.limits, accepts=self.accepts)
        return self._prepared(part)

    def _prompt_ids(
        self, text: str | None, token_ids: Sequence[int] | None, budget: TextBudget | None
    ) -> Sequence[int]:
        return prompt_ids(self.tokenizer, text, token_ids, budget)

    def _inputs(
        self,
        ids: Sequence[int],
        parts: Sequence[MediaPart],
        is_known: IsKnown | None,
        budget: TextBudget | None,
    ) -> ModelInputs:
        """Return the inputs of ids with a placeholder per part. Media are decoded once all have room in the buffer."""
        placement = self._place(ids, [self._prepared(part) for part in parts])
        media = [medium for medium, _ in placement.media]
        check_cancelled = budget.check_cancelled if budget else lambda: None
        allocation = self.media_buffer.allocate([medium.num_rows for medium in media], check_cancelled)
        if allocation is not None:
            self._write(media, allocation, is_known, check_cancelled)
        regions = () if allocation is None else allocation.regions
        return ModelInputs(
            tuple(placement.token_ids),
            placement.positions,
            placement.next_position,
            tuple(
                medium.placed(spans, region) for (medium, spans), region in zip(placement.media, regions, strict=True)
            ),
            allocation,
        )

    def _write(
        self,
        media: Sequence[PreparedMedium],
        allocation: Allocation,
        is_known: IsKnown | None,
        check_cancelled: Callable[[], None],
    ) -> None:
        """Decode media into their regions; postpone media whose encoder output is cached."""
        try:
            for medium, region in zip(media, allocation.regions, strict=True):
                check_cancelled()
                if is_known is not None and is_known(medium.key):
                    self.media_buffer.write_later(region, medium.write)
                else:
                    medium.write(self.media_buffer.view(region))
        except BaseException:
            allocation.release()  # the error's traceback would keep the allocation
            raise

    def _prepared(self, part: MediaPart) -> PreparedMedium:
        if not isinstance(part.source, Precomputed):
            return self._prepare(part)
        if part.with_sound:
            raise RequestError(f"{part.name}: use_audio_in_video is true, but {part.source.type} have no sound")
        return self._prepare_values(part.source, part.name)

    def _prepare_values(self, given: Precomputed, name: str) -> PreparedMedium:
        """Return the medium of precomputed values."""
        sizes = self._value_sizes(given, name)
        values = prepare_values(given, sizes, name, self.limits, self.media_buffer.rows.dtype)
        return self._medium_of_values(given, name, sizes, values, given.grid)

    def _medium_of_values(
        self, given: Precomputed, name: str, sizes: ValueSizes, values: PreparedValues, grid: tuple[int, int, int]
    ) -> PreparedMedium:
        return PreparedMedium(
            name,
            given.kind,
            key=values.key,
            grid=grid,
            num_rows=values.num_buffer_rows(self.media_buffer.shape[1]),
            encoder_rows=1 if given.is_encoded else sizes.encoder_rows,
            write=values.write,
            times_s=given.times_s,
            num_states=sizes.num_states,
            tiling=given.tiling,
            feature_width=sizes.feature_width if given.is_encoded else 0,
        )

    @abstractmethod
    def _value_sizes(self, given: Precomputed, name: str) -> ValueSizes:
        """Return the sizes for a medium of this grid; raise RequestError for an impossible grid."""

    @abstractmethod
    def _prepare(self, part: MediaPart) -> PreparedMedium:
        """Return the medium of a part, with its size and key from its header."""

    @abstractmethod
    def _place(self, ids: Sequence[int], media: Sequence[PreparedMedium]) -> Placement:
        """Return the prompt with every medium in place of its placeholders, in order."""
