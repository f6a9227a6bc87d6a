"""How much text a request may have: measured before a template is rendered or anything is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

from tilewright.inputs.messages import source_of
from tilewright.inputs.precomputed import type_of
from tilewright.types import ContextLengthExceeded, Messages, RequestError

# A template takes 60 us for a message and 15 us for a part of one: 0.25 s and 0.4 s at these limits, in which other
# threads get the interpreter only in turns.
MAX_MESSAGES = 4096
MAX_VALUES = 1 << 16  # strings, numbers, lists and objects of messages, tools and template arguments


class TooManyItems(RequestError):
    """A list of a request that is longer than it may be."""

    code = "array_above_max_length"  # OpenAI's name for it


@dataclass(frozen=True)
class TextLimits:
    """What follows from a context of max_context tokens, where none stands for more than max_token_bytes of text."""

    max_context: int
    max_token_bytes: int

    @property
    def max_characters(self) -> int:
        """More cannot fit: a character has at least one byte, a token at most max_token_bytes."""
        return self.max_context * self.max_token_bytes

    def check_text(self, text: str) -> int:
        """How many characters it has; ContextLengthExceeded if they cannot fit the context, however tokenized."""
        if len(text) > self.max_characters:
            raise self._too_long(f"your prompt has {len(text)} characters")
        return len(text)

    def check_prompt(self, text: str | None, token_ids: Sequence[int] | None) -> int:
        """How many characters a prompt of either has; ContextLengthExceeded if it cannot fit the context."""
        if token_ids is not None and len(token_ids) > self.max_context:
            raise ContextLengthExceeded(self.max_context, f"your prompt resulted in {len(token_ids)} tokens")
        return 0 if text is None else self.check_text(text)

    def check_chat(self, messages: Messages, tools: Sequence[object] | None, template_args: object) -> int:
        """How many characters a conversation has; RequestError if these, its messages or its values are too many.

        Media are not counted.
        """
        if len(messages) > MAX_MESSAGES:
            raise TooManyItems(f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}")
        num_values = num_characters = 0
        pending: list[object] = [tools, template_args, *(value for item in messages for value in _texts_of(item))]
        while pending:
            value = pending.pop()
            num_values += 1
            if isinstance(value, str):
                num_characters += len(value)
            elif isinstance(value, Mapping):
                pending += value.keys()
                pending += value.values()
            elif isinstance(value, list | tuple):
                pending += value
            if num_values + len(pending) > MAX_VALUES:
                raise TooManyItems(
                    f"messages, tools and template arguments have more than {MAX_VALUES} keys and values, the limit"
                )
            if num_characters > self.max_characters:
                raise self._too_long(
                    f"your messages, tools and template arguments have {num_characters} characters or more"
                )
        return num_characters

    def _too_long(self, what: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            self.max_context,
            f"{what}, and {self.max_context} tokens hold {self.max_characters} at most: the longest token has "
            f"{self.max_token_bytes} bytes",
        )


@dataclass(frozen=True)
class TextBudget:
    """The limits of one request while it is prepared, and whether it was cancelled."""

    limits: TextLimits
    is_cancelled: Callable[[], bool] = lambda: False

    def check_cancelled(self) -> None:
        if self.is_cancelled():
            raise CancelledError


def _texts_of(message: object) -> list[object]:
    """The values of a message without its media."""
    if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), list | tuple):
        return [message]
    return [{**message, "content": None}, *(part for part in content if not _is_medium(part))]


def _is_medium(part: object) -> bool:
    try:
        return isinstance(part, Mapping) and (type_of(part) is not None or source_of(part) is not None)
    except RequestError:  # `normalize` raises it again, with the name of the item
        return False
