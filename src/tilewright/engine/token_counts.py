"""How often a sequence has each token, as the penalties count them."""

from __future__ import annotations

import numpy as np

from tilewright.engine.sequence import Sequence


class TokenCounts:
    """The distinct tokens of a sequence and their number in its output, kept up as it grows.

    Arrays beside a dict, so that a step hands over a slice instead of walking all tokens. Tokens the head has no logits
    for (placeholders of media, in some models) are left out.
    """

    def __init__(self, sequence: Sequence, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._slot_by_id: dict[int, int] = {}
        self._ids = np.empty(256, np.int64)
        self._counts = np.empty(256, np.int32)
        # Only the repetition penalty reads the prompt.
        if sequence.params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(sequence.token_ids[: sequence.num_prompt_tokens]):
                self._count(token_id, 0)
        self._num_read = sequence.num_prompt_tokens

    def rows(self, sequence: Sequence) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids and counts as the sequence's next token sees them, then as the one after each draft does."""
        for token_id in sequence.token_ids[self._num_read :]:
            self._count(token_id, 1)
        self._num_read = sequence.num_tokens
        size = len(self._slot_by_id)
        rows = [(self._ids[:size], self._counts[:size])]
        for token_id in sequence.draft_token_ids:
            ids, counts = rows[-1]
            if token_id < self._vocabulary_size:
                found = np.flatnonzero(ids == token_id)
                counts = counts.copy()
                if found.size:
                    counts[found] += 1
                else:
                    ids, counts = np.append(ids, np.int64(token_id)), np.append(counts, np.int32(1))
            rows.append((ids, counts))
        return rows

    def _count(self, token_id: int, count: int) -> None:
        if token_id >= self._vocabulary_size:
            return
        slot = self._slot_by_id.get(token_id)
        if slot is None:
            slot = self._slot_by_id[token_id] = len(self._slot_by_id)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += count
