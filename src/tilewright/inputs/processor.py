"""Messages or prompts to what a model of text alone reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from tilewright.inputs.chat_ids import ChatEncoder
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.media import Fetch
from tilewright.inputs.messages import media_of_prompt, normalize
from tilewright.inputs.text_limits import TextBudget
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import MediaKind, Messages, ModelInputs, RequestError


class TextProcessor:
    """Turns requests into `ModelInputs`; pictures, videos and sounds are refused in the model's name."""

    accepts: Sequence[MediaKind] = ()
    picture_token_ids: tuple[int, ...] = ()
    media_buffer = None

    def __init__(
        self, name: str, tokenizer: Tokenizer, template: ChatTemplate | None, missing: str | None = None
    ) -> None:
        """`missing` says what pictures would need that the model has not, and is told instead."""
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
        fetch: Fetch | None = None,
        is_known: Callable[[bytes], bool] | None = None,
        budget: TextBudget | None = None,
        **template_args: Any,
    ) -> ModelInputs:
        """The inputs of a conversation, up to where the model answers."""
        if self._encoder is None:
            raise RequestError(f"{self.name} has no chat template: give it a prompt instead")
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
        """The inputs of a text, which gets the tokenizer's beginning-of-text, or of token ids as they are."""
        media_of_prompt(media, accepts=self.accepts, model=self.name, missing=self._missing)
        return _inputs(prompt_ids(self.tokenizer, text, token_ids, budget))


def prompt_ids(
    tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int] | None, budget: TextBudget | None
) -> list[int]:
    """The ids of a text, with the tokenizer's beginning-of-text, or those given; one of the two must be.

    None is below 0; whether the model has them all is the engine's to check.
    """
    if (text is None) == (token_ids is None):
        raise RequestError("give either a text or token ids")
    if text is not None:
        return tokenizer.encode(text, add_special_tokens=True, budget=budget)
    ids = [index(token_id) for token_id in (() if token_ids is None else token_ids)]
    if any(token_id < 0 for token_id in ids):
        raise RequestError(f"token id {min(ids)}, expected 0 or more")
    return ids


def _inputs(ids: Sequence[int], is_reasoning: bool = False) -> ModelInputs:
    positions = np.arange(len(ids), dtype=np.int64)[None]
    return ModelInputs(tuple(ids), positions, len(ids), opens_reasoning=is_reasoning)
