"""Text to token ids and back, by the checkpoint's own tokenizer, without broken characters in a stream."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tilewright.inputs import folder_tokenizer
from tilewright.types import ContextLengthExceeded

if TYPE_CHECKING:
    import tokenizers

    from tilewright.inputs.messages import TextBudget


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


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Characters counted in one go, which takes 0.1 s at most. A cut in mid-word adds a few tokens to the 500 of a piece.
PIECE_CHARACTERS = 1 << 16
_COUNT_MARGIN = 1.25


class Tokenizer:
    """Encodes and decodes. Ids the vocabulary has no token for (padded heads can choose them) decode to nothing."""

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
        self.special_tokens = dict(special_tokens)  # name, as templates use it -> text
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
        """The tokenizer of a checkpoint's folder: tokenizer.json and the files beside it."""
        return cls(**folder_tokenizer.build(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a GGUF file's metadata (the `tokenizer.*` keys) describe."""
        from tilewright.inputs.gguf_tokenizer import build

        return cls(**build(metadata))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text in the vocabulary."""
        return self._backend.token_to_id(token)

    def has_token(self, token_id: int) -> bool:
        """False of ids past the vocabulary, or in a gap of it."""
        return self._backend.id_to_token(token_id) is not None

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of text that the longest token stands for."""
        added = self._backend.get_added_tokens_decoder().values()
        longest_added = max((len(token.content.encode()) for token in added), default=1)
        # In byte-level vocabularies a character stands for a byte.
        size = len if self._is_byte_level else lambda token: len(token.encode())
        return max(longest_added, *map(size, self._backend.get_vocab(with_added_tokens=False)))

    def encode(self, text: str, *, add_special_tokens: bool = False, budget: TextBudget | None = None) -> list[int]:
        """Ids of the text. Special tokens in it are encoded as such; `add_special_tokens` adds the beginning-of-text.

        With a `budget`, a text that is far too long is refused before its ids take time and memory; one that is a few
        tokens too long is not.
        """
        return self._ids(self._within(text, budget), add_special_tokens)

    def encode_marked(self, text: str, mark: str, *, budget: TextBudget | None = None) -> list[int]:
        """Ids of a text in which added tokens have a mark before them; those without the mark are encoded as text."""
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
        """The text as Unicode; ContextLengthExceeded if it is far longer than the budget allows."""
        text = _as_unicode(text)
        if budget is not None:
            budget.limits.check_text(text)
            self._check_count(text, budget)
        return text

    def _check_count(self, text: str, budget: TextBudget) -> None:
        """ContextLengthExceeded once pieces of the text have more tokens than the context, by a margin.

        Pieces only count: where they are cut, their ids are not those of the whole text.
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
                    f"your prompt has {len(text)} characters, of which the first {min(end, len(text))} alone resulted "
                    f"in about {num_tokens} tokens",
                )
        budget.check_cancelled()

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return _encode(self._backend, text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text: perhaps a part of a character."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self.find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """What one token reads as; parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_byte_token(self, token_id: int) -> bool:
        """True of a token that stands for one byte of a character the vocabulary lacks."""
        if self._is_byte_level or token_id in self._added_ids:
            return False
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def stream(self, *, skip_special_tokens: bool = True) -> ByteStream | PieceStream:
        """A decoder for tokens that come one after another."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return ByteStream(self, skipped) if self._is_byte_level else PieceStream(self, skipped)

    def find_bytes(self, token_id: int) -> bytes:
        """As token_bytes, without keeping the answer: for a walk over the whole vocabulary."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            byte_of = _byte_of_character()
            # A token with a character outside the table (an added one with a space in it) stands for its own text.
            if all(character in byte_of for character in token):
                return bytes(byte_of[character] for character in token)
        elif token_id not in self._added_ids:
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            token = token.replace("▁", " ")
        return token.encode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    if not _BYTE_TABLE:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        _BYTE_TABLE.update({chr(byte): byte for byte in printable})
        _BYTE_TABLE.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return _BYTE_TABLE


_BYTE_TABLE: dict[str, int] = {}


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # Of all ways to encode, those of batches alone let other threads have the interpreter meanwhile.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _as_unicode(text: str) -> str:
    """The text with ? for lone surrogates, which have no UTF-8 form; JSON bodies can carry one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
