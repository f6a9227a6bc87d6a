"""Text of tokens that come one after another, without broken characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenTexts(Protocol):
    """What streams ask of a tokenizer."""

    def has_token(self, token_id: int) -> bool: ...

    def is_byte_token(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class ByteStream:
    """Text of byte-level tokens: a character comes out when its last byte is in."""

    def __init__(self, tokenizer: TokenTexts, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text these tokens complete."""
        token_bytes = self._tokenizer.token_bytes
        return self._utf8.decode(b"".join(token_bytes(token_id) for token_id in ids if token_id not in self._skipped))

    def flush(self) -> str:
        """What is left; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


class PieceStream:
    """Text of tokens that are pieces of text, with byte tokens for rare characters.

    The decoder decodes a run of byte tokens as a whole (one bad byte makes all of it U+FFFD), so a run is held until a
    piece ends it. It also strips the space of a text's first piece, so the last piece that was emitted is decoded again
    in front of the held ones, and its text is removed from the result.
    """

    def __init__(self, tokenizer: TokenTexts, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._anchor: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text these tokens complete."""
        # An id without a token must not part a run of bytes: the decoder does not see it.
        has_token = self._tokenizer.has_token
        self._held += [token_id for token_id in ids if token_id not in self._skipped and has_token(token_id)]
        end = len(self._held)
        while end and self._tokenizer.is_byte_token(self._held[end - 1]):
            end -= 1
        return self._emit(end)

    def flush(self) -> str:
        """What is left; bytes that are no character become U+FFFD."""
        return self._emit(len(self._held))

    def _emit(self, count: int) -> str:
        if count == 0:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._anchor, skip_special_tokens=False)
        text = decode(self._anchor + self._held[:count], skip_special_tokens=False)
        self._anchor = self._held[count - 1 : count]
        self._held = self._held[count:]
        return text[len(before) :]
