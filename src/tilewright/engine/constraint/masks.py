"""Takes away, from the logits of constrained answers, what their grammars forbid."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tilewright.engine.constraint.matcher import Matcher
from tilewright.engine.sequence import Sequence
from tilewright.engine.step import Chunk
from tilewright.engine.upload import Uploads
from tilewright.ops import sample as ops


class Masks:
    """The masks of a step's rows.

    In memory that is used again: all weights have just gone through the caches, and making three small arrays takes
    longer than a mask. And by the thread that steps, though masks are known before logits are: a thread beside the
    model made steps 1 to 2 % longer still, since kernels keep every core busy and wait for the one that is shared.
    """

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._words = torch.empty(0, 0, dtype=torch.int32)
        self._rows = torch.empty(0, dtype=torch.int64)

    def apply(self, logits: Tensor, chunks: Items[Chunk]) -> None:
        """Changes the logits of the sampled rows, chunk after chunk: -inf for what is forbidden."""
        constrained: list[tuple[Matcher, Sequence]] = []
        rows: list[int] = []
        num_rows = 0
        for chunk in chunks:
            matcher = chunk.sequence.matcher
            if matcher is not None:
                constrained.append((matcher, chunk.sequence))
                rows.extend(range(num_rows, num_rows + chunk.num_sampled))
            num_rows += chunk.num_sampled
        if not rows:
            return
        self._reserve(len(rows), constrained[0][0].num_words)
        first = 0
        for matcher, sequence in constrained:
            drafts = sequence.draft_token_ids
            unwanted = [sequence.unwanted_token_ids(draft) for draft in range(1 + len(drafts))]
            matcher.fill(self._words, first, drafts, unwanted)
            first += 1 + len(drafts)
        self._rows.numpy()[:first] = rows
        ops.mask(logits, *self._uploads.send(self._rows[:first], self._words[:first]))

    def _reserve(self, num_rows: int, num_words: int) -> None:
        if self._words.shape[0] < num_rows:
            self._words = torch.empty(2 * num_rows, num_words, dtype=torch.int32)
            self._rows = torch.empty(2 * num_rows, dtype=torch.int64)
