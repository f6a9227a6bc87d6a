"""The position of one answer in its grammar, and the tokens that may come next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tilewright.engine.constraint.grammar import error_of
from tilewright.types import RequestError

if TYPE_CHECKING:
    import llguidance

    from tilewright.engine.constraint.vocabulary import Vocabulary


class Matcher:
    """Holds one answer to its grammar. Not thread-safe.

    Where the grammar forces a text that has several tokenizations, only the tokenizer's own is allowed: the model reads
    what it was trained on.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        fail: Callable[[str], RequestError],
        *,
        names_token_ids: bool,
    ) -> None:
        self.num_words = vocabulary.num_words
        self.error: RequestError | None = None  # set when a limit was hit; masks are invalid from then on
        self._matcher = matcher
        # A grammar that names tokens by id may name rows of the head that have no token.
        self._known = vocabulary.known if names_token_ids else None
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._fail = fail

    @property
    def is_complete(self) -> bool:
        """Return whether no token can be added any more."""
        return self._matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        return self._matcher.is_accepting()

    def advance(self, token_id: int) -> None:
        """Accept a drawn token: one that the mask allowed and that does not end the answer."""
        self._matcher.consume_token(token_id)
        self._check()

    def forced_token_ids(self) -> list[int]:
        """Return the tokens that the grammar forces next; empty if there is a choice."""
        forced = self._matcher.compute_ff_tokens()
        self._check()
        return forced

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, the grammar allows next."""
        inner = [] if self.is_complete else list(token_ids)
        for index, token_id in enumerate(inner):
            if token_id in self._stop_token_ids:
                inner = inner[:index]
                break
        count = self._matcher.validate_tokens(inner) if inner else 0
        self._check()
        return count

    def fill(self, words: Tensor, first: int, drafts: Sequence[int], suppressed: Sequence[Collection[int]]) -> None:
        """Write the mask of the next token, then of the one after each draft, into rows of words from `first` on.

        words are int32 [N, num_words], as `ops.sample.mask` reads them. Tokens in suppressed[i] are removed from mask i
        unless that would leave none.
        """
        row_bytes = 4 * self.num_words
        address = words.data_ptr() + first * row_bytes
        for index, banned in enumerate(suppressed):
            self._matcher.unsafe_compute_mask_ptr(address + index * row_bytes, row_bytes)
            if self._known is not None:
                words.numpy()[first + index] &= self._known
            if banned:
                _remove(words.numpy()[first + index], banned)
            if index < len(drafts):
                self._matcher.consume_token(drafts[index])
        if drafts:
            self._matcher.rollback(len(drafts))
        self._check()

    def raise_error(self) -> None:
        """Raise `error`, if there is one: the grammar has become too costly to follow."""
        if self.error is not None:
            raise self.error

    def _check(self) -> None:
        if self.error is None and (error := error_of(self._matcher)) is not None:
            self.error = self._fail(error)


def _remove(words: np.ndarray, token_ids: Collection[int]) -> None:
    kept = words.view(np.uint32).copy()
    for token_id in token_ids:
        if token_id // 32 < len(kept):
            kept[token_id // 32] &= np.uint32(0xFFFF_FFFF ^ 1 << token_id % 32)
    if kept.any():
        words.view(np.uint32)[:] = kept
