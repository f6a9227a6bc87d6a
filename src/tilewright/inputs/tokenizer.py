"""Encodes and decodes text with the checkpoint's tokenizer; streams contain no broken characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.inputs import folder_tokenizer
from tilewright.types import ContextLengthExceeded

if TYPE_CHECKING:
    import tokenizers

    from tilewright.inputs.messages import TextBudget


class ByteStream:
    """Decodes byte-level tokens: a character is returned when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Append tokens; return the text that they complete."""
        token_bytes = self._tokenizer.token_bytes
        return self._utf8.decode(b"".join(token_bytes(token_id) for token_id in ids if token_id not in self._skipped))

    def flush(self) -> str:
        """Return the rest; an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


class PieceStream:
    """Decodes tokens that are pieces of text, with byte tokens for rare characters.

    The backend decodes a run of byte tokens as a whole (one bad byte makes all of it U+FFFD), so a run is held until a
    piece ends it. The backend also strips the space of a text's first piece, so the last emitted piece is decoded again
    before the held ones, and its text is removed from the result.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._anchor: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Append tokens; return the text that they complete."""
        # An id without a token must not split a run of bytes: the decoder does not see it.
        has_token = self._tokenizer.has_token
        self._held += [token_id for token_id in ids if token_id not in self._skipped and has_token(token_id)]
        end = len(self._held)
        while end and self._tokenizer.is_byte_token(self._held[end - 1]):
            end -= 1
        return self._emit(end)

    def flush(self) -> str:
        """Return the rest; bytes that form no character become U+FFFD."""
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


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Characters tokenized at once, in 0.1 s at most. A cut within a word adds a few tokens to a piece's 500 or more.
PIECE_CHARACTERS = 1 << 16
_COUNT_MARGIN = 1.25


class Tokenizer:
    """Encodes and decodes text. Ids without a token (padded heads can produce them) decode to nothing."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        stop_token_ids: Sequence[int],
        chat_template: Mapping[str, str] | None = None,
    ) -> None:
        from tokenizers import decoders

        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)  # name in templates -> text
        self.stop_token_ids = tuple(stop_token_ids)
        self.chat_template = (
            dict(chat_template) if chat_template else None
        )  # name -> source; "default" is the usual one
        bos_token = self.special_tokens.get("bos_token")
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.added_tokens = {token.content: token.special for token in added.values()}  # text -> whether special
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Return the tokenizer of a checkpoint's folder: tokenizer.json and the files beside it."""
        return cls(**folder_tokenizer.build(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Return the tokenizer of a GGUF file's metadata (the `tokenizer.*` keys)."""
        from tilewright.inputs.gguf_tokenizer import build

        return cls(**build(metadata))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact text in the vocabulary; None if there is none."""
        return self._backend.token_to_id(token)

    def has_token(self, token_id: int) -> bool:
        """Return whether the vocabulary has the id; it may have gaps."""
        return self._backend.id_to_token(token_id) is not None

    @cached_property
    def max_token_bytes(self) -> int:
        """The longest token's size in bytes of text."""
        added = self._backend.get_added_tokens_decoder().values()
        longest_added = max((len(token.content.encode()) for token in added), default=1)
        # In byte-level vocabularies a character stands for a byte.
        size = len if self._is_byte_level else lambda token: len(token.encode())
        return max(longest_added, *map(size, self._backend.get_vocab(with_added_tokens=False)))

    def encode(self, text: str, *, add_special_tokens: bool = False, budget: TextBudget | None = None) -> list[int]:
        """Return the ids of the text. It may contain special tokens; `add_special_tokens` adds the beginning-of-text.

        With a `budget`, a text that is far too long is refused before encoding it takes time and memory; a text that is
        a few tokens too long is not.
        """
        return self._ids(self._within(text, budget), add_special_tokens)

    def encode_marked(self, text: str, mark: str, *, budget: TextBudget | None = None) -> list[int]:
        """Return the ids of a text in which added tokens follow a mark; added tokens without it are encoded as text."""
        import tokenizers

        # The parts are shared, not copied: 0.2 ms for Qwen3's tokenizer.
        backend = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._backend, part) is not None:
                setattr(backend, part, getattr(self._backend, part))
        original = {}
        for token_id, token in sorted(self._backend.get_added_tokens_decoder().items()):
            flags = {name: getattr(token, name) for name in folder_tokenizer.ADDED_TOKEN_FLAGS}
            backend.add_tokens([tokenizers.AddedToken(mark + token.content, **flags)])
            original[backend.token_to_id(mark + token.content)] = token_id
        ids = _encode(backend, self._within(text, budget), False)
        return [original.get(token_id, token_id) for token_id in ids]

    def _within(self, text: str, budget: TextBudget | None) -> str:
        """Return the text as valid Unicode; raise ContextLengthExceeded if it is far longer than the budget allows."""
        text = _as_unicode(text)
        if budget is not None:
            budget.limits.check_text(text)
            self._check_count(text, budget)
        return text

    def _check_count(self, text: str, budget: TextBudget) -> None:
        """Raise ContextLengthExceeded if pieces of the text have more tokens than the context, by a margin.

        Pieces are only counted: at the cuts, their ids differ from those of the whole text.
        """
        max_context, num_tokens = budget.limits.max_context, 0
        if len(text) <= max(PIECE_CHARACTERS, max_context):
            return
        for end in range(PIECE_CHARACTERS, len(text) + PIECE_CHARACTERS, PIECE_CHARACTERS):
            budget.check_cancelled()
            num_tokens += len(self._ids(text[end - PIECE_CHARACTERS : end], False))
            if num_tokens > _COUNT_MARGIN * max_context:
                raise ContextLengthExceeded(
                    max_context,
                    f"your prompt has {len(text)} characters; the first {min(end, len(text))} alone resulted "
                    f"in about {num_tokens} tokens",
                )
        budget.check_cancelled()

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return _encode(self._backend, text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, which may be a part of a character."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self.find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token stands for one byte of a character that the vocabulary lacks."""
        if self._is_byte_level or token_id in self._added_ids:
            return False
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def stream(self, *, skip_special_tokens: bool = True) -> ByteStream | PieceStream:
        """Return a decoder for tokens that arrive one after another."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return ByteStream(self, skipped) if self._is_byte_level else PieceStream(self, skipped)

    def find_bytes(self, token_id: int) -> bytes:
        """Return `token_bytes` without caching it, for loops over the whole vocabulary."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            byte_of = _byte_of_character()
            # A token with a character outside the table (such as an added token with a space) stands for its own text.
            if all(character in byte_of for character in token):
                return bytes(byte_of[character] for character in token)
        elif token_id not in self._added_ids:
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            token = token.replace("▁", " ")
        return token.encode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies: printable Latin-1, the rest from U+0100 on."""
    if not _BYTE_TABLE:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        _BYTE_TABLE.update({chr(byte): byte for byte in printable})
        _BYTE_TABLE.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return _BYTE_TABLE


_BYTE_TABLE: dict[str, int] = {}


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # Only batch encoding releases the interpreter lock.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _as_unicode(text: str) -> str:
    """Return the text with ? for lone surrogates, which have no UTF-8 form and can occur in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
