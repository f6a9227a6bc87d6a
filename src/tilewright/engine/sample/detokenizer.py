"""Turns the tokens of an answer into its growing text, up to a stop string."""

from __future__ import annotations

from typing import Protocol


class TokenDecoder(Protocol):
    """Decodes a growing list of tokens; holds back the bytes of incomplete characters."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one answer.

    Text that may be the start of a stop string is held back until that is decided; the stop string itself is never
    returned. The first min_tokens - 1 tokens end nothing, and no stop string begins in their text.
    """

    def __init__(self, decoder: TokenDecoder, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._stop = stop
        self._num_unchecked = min_tokens - 1
        self._held = ""
        self._parts: list[str] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, and set is_stopped if it completes a stop string."""
        text = self._decoder.push([token_id])
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return self._release(text)
        return self._check(text)

    def flush(self) -> str:
        """Return the text that was held back, once no more tokens come."""
        if self.is_stopped:
            return ""
        text = self._check(self._decoder.flush())
        held, self._held = self._held, ""
        return text + self._release(held)

    def _check(self, text: str) -> str:
        if not self._stop:
            return self._release(text)
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            # The match that ends first, as if characters came one by one: how they are cut into tokens changes nothing.
            self.is_stopped = True
            self._held = ""
            return self._release(text[: min(found)[1]])
        num_held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - num_held :]
        return self._release(text[: len(text) - num_held])

    def _release(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
