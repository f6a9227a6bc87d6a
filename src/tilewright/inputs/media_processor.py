"""Messages or prompts with pictures and videos to what a model reads: the part that is alike in all families."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.inputs.chat_ids import ChatEncoder
from tilewright.inputs.chat_template import ChatTemplate, normalize
from tilewright.inputs.media import Fetch, MediaKind, MediaLimits, MediaPart
from tilewright.inputs.opener import InProcessOpener, Opener
from tilewright.inputs.processor import prompt_ids
from tilewright.inputs.text_limits import TextBudget
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import Messages, ModelInputs, RequestError

IsKnown = Callable[[bytes], bool]


class MediaProcessor(ABC):
    """Turns requests into `ModelInputs`. May be called from several threads at once.

    `is_known` says of a medium's key that what the model's encoder makes of it is at hand: it is then not decoded.
    `budget` bounds the text that is tokenized.
    """

    accepts: Sequence[MediaKind]

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: MediaLimits | None,
        dtype: torch.dtype,
        opener: Opener | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._encoder = None if template is None else ChatEncoder(template, tokenizer)
        self.limits = limits or MediaLimits()
        self.dtype = dtype
        self.opener = opener or InProcessOpener()

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[object] | None = None,
        fetch: Fetch | None = None,
        is_known: IsKnown | None = None,
        budget: TextBudget | None = None,
        **template_args: Any,
    ) -> ModelInputs:
        """The inputs of a conversation, up to where the model answers."""
        if self._encoder is None:
            raise RequestError("the model has no chat template: give it a prompt instead")
        normalized, parts = normalize(messages, limits=self.limits, fetch=fetch, accepts=self.accepts)
        ids, opens_reasoning = self._encoder.encode(normalized, tools=tools, budget=budget, **template_args)
        inputs = self._inputs(ids, parts, fetch, is_known)
        return dataclasses.replace(inputs, opens_reasoning=opens_reasoning)

    def prompt(
        self,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        images: Sequence[object] = (),
        videos: Sequence[object] = (),
        *,
        is_known: IsKnown | None = None,
        budget: TextBudget | None = None,
    ) -> ModelInputs:
        """The inputs of a text, or of token ids, with one placeholder token per picture and video, in order.

        A video is a file, frames, or {"video": frames, "fps": of the frames}.
        """
        ids = self._prompt_ids(text, token_ids, budget)
        content = [_as_part("image", item) for item in images] + [_as_part("video", item) for item in videos]
        _, parts = normalize([{"role": "user", "content": content}], limits=self.limits, accepts=self.accepts)
        return self._inputs(ids, parts, None, is_known)

    def _prompt_ids(
        self, text: str | None, token_ids: Sequence[int] | None, budget: TextBudget | None
    ) -> Sequence[int]:
        return prompt_ids(self.tokenizer, text, token_ids, budget)

    @abstractmethod
    def _inputs(
        self, ids: Sequence[int], parts: Sequence[MediaPart], fetch: Fetch | None, is_known: IsKnown | None
    ) -> ModelInputs:
        """The inputs of ids with a placeholder for each of the parts."""


def _as_part(kind: MediaKind, item: object) -> dict[str, Any]:
    return {"type": kind, **item} if isinstance(item, Mapping) else {"type": kind, kind: item}
