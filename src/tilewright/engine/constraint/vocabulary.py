"""The tokenizer in llguidance's interface: the bytes of every token, and the tokens of a forced text."""

from __future__ import annotations

import llguidance
import numpy as np

from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import REASONING_TAGS


class Vocabulary:
    """The tokens that the model's head has a row for. Takes about a second to build for 150,000 tokens.

    A token is the bytes that it adds to an answer, so that the text that fits a grammar is the text that the reader
    gets: added tokens that are shown, such as Qwen's </think>, are text like any other. Special tokens and those that
    end an answer are not, and ids without a token are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        tokens = [tokenizer.find_bytes(token_id) for token_id in range(size)]
        self.stop_token_ids = [token_id for token_id in tokenizer.stop_token_ids if token_id < size]
        if not self.stop_token_ids:
            # The library requires one: an id past the head's rows is never drawn.
            self.stop_token_ids = [size]
            tokens.append(b"")
        # A tag around reasoning that is a special token counts as text: the model has no other way to write it.
        tags = {tokenizer.token_id(tag) for tag in REASONING_TAGS}
        special = {*tokenizer.special_token_ids, *self.stop_token_ids} - tags
        self.special_tokens = {
            token_id: tokens[token_id].decode("utf-8", "replace") for token_id in sorted(special) if token_id < size
        }
        self.num_tokens = len(tokens)
        self.num_words = -(-len(tokens) // 32)
        self.known = _bits_of([bool(token) for token in tokens])
        source = _Source(tokenizer, tokens, list(self.special_tokens), self.stop_token_ids)
        self.tokenizer = llguidance.LLTokenizer(source, eos_token=self.stop_token_ids)
        source.tokens = []  # copied by now


class _Source(llguidance.TokenizerWrapper):
    """The tokenizer in llguidance's interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], stop: list[int]) -> None:
        self.eos_token_id = stop[0]
        self.special_token_ids = special
        self.tokens = tokens
        self._tokenizer = tokenizer
        self._num_tokens = len(tokens)
        self._special = frozenset(special)
        self._id_by_bytes: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes are exactly the text's.

        Tokenizers may change a text: they put a space in front, or normalise it. Against the former the text is
        tokenized again after a line break, which no token joins with what follows; against the latter the longest
        tokens with its bytes are taken.
        """
        wanted = text.encode()
        ids = self._tokenizer.encode(text)
        if self._are(ids, wanted):
            return ids
        ids = self._tokenizer.encode("\n" + text)
        for start in range(1, min(4, len(ids))):
            if self._are(ids[start:], wanted):
                return ids[start:]
        return self._longest_tokens(wanted)

    def _are(self, ids: list[int], wanted: bytes) -> bool:
        is_text = all(token_id < self._num_tokens and token_id not in self._special for token_id in ids)
        return is_text and b"".join(self._tokenizer.token_bytes(token_id) for token_id in ids) == wanted

    def _longest_tokens(self, text: bytes) -> list[int]:
        if not self._id_by_bytes:
            ids = (token_id for token_id in range(self._num_tokens) if token_id not in self._special)
            self._id_by_bytes = {self._tokenizer.find_bytes(token_id): token_id for token_id in ids}
        longest = max(map(len, self._id_by_bytes))
        found, start = [], 0
        while start < len(text):
            lengths = range(min(longest, len(text) - start), 0, -1)
            length = next(length for length in lengths if text[start : start + length] in self._id_by_bytes)
            found.append(self._id_by_bytes[text[start : start + length]])
            start += length
        return found


def _bits_of(flags: list[bool]) -> np.ndarray:
    """Return flags as int32 words, flag i as bit i % 32 of word i // 32; the rest of the last word is 0."""
    padded = np.zeros(-(-len(flags) // 32) * 32, bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.int32)
