"""Prompts as token ids, within a pipeline's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.inputs.chat_ids import ChatEncoder
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.model_files import CheckpointError
from tilewright.types import RequestError


class ChatPrompts:
    """Prompts as a user's message in the tokenizer's chat template. Special tokens in a prompt are plain text."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, **template_args: Any) -> None:
        if not tokenizer.chat_template:
            raise CheckpointError("the tokenizer has no chat template, which this pipeline writes prompts with")
        self._encoder = ChatEncoder(ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens), tokenizer)
        self._max_tokens, self._template_args = max_tokens, template_args

    def ids(self, prompt: str) -> list[int]:
        ids, _ = self._encoder.encode([{"role": "user", "content": prompt}], **self._template_args)
        check_length(ids, self._max_tokens)
        return ids


def check_length(ids: Sequence[int], max_tokens: int) -> None:
    """RequestError for a prompt of more tokens than the text encoder of the pipeline is given."""
    if len(ids) > max_tokens:
        raise RequestError(
            f"the prompt has {len(ids)} tokens with its template, expected at most {max_tokens}", param="prompt"
        )
