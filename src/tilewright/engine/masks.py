"""What the grammars of a step's constrained answers allow, as bits that the sampler takes logits away by."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.step import Chunk
from tilewright.ops import sample as ops
from tilewright.ops.native import work_alone


class Masks:
    """The masks of the rows that a step draws tokens from, computed by a thread of their own beside the model.

    A mask takes some 15 to 100 us of one core: in the step's own thread, 8 of them made a step of 15 ms longer by 3 to
    6 %. The thread starts when the first is asked for. From `begin` to `apply` or `wait` the matchers are its own.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "masks", work_alone)
        self._pending: Future[None] | None = None
        self._words = np.empty((0, 0), np.int32)  # of this step or an earlier one
        self._rows: list[int] = []

    def begin(self, chunks: Items[Chunk]) -> None:
        """Begins to compute the masks of a step."""
        self._rows = []
        constrained = []
        row = num_words = 0
        for chunk in chunks:
            matcher = chunk.sequence.matcher
            if matcher is not None and chunk.num_sampled:
                constrained.append(chunk)
                self._rows.extend(range(row, row + chunk.num_sampled))
                num_words = matcher.num_words
            row += chunk.num_sampled
        if not constrained:
            return
        if self._words.shape[0] < len(self._rows) or self._words.shape[1] != num_words:
            self._words = np.empty((len(self._rows), num_words), np.int32)
        self._pending = self._worker.submit(_fill, self._words, constrained)

    def wait(self) -> None:
        """Returns when nothing is being computed; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def apply(self, logits: Tensor) -> None:
        """Changes the logits of the sampled rows, chunk after chunk: -inf for what the grammars forbid."""
        self.wait()
        if self._rows:
            ops.mask(logits, torch.tensor(self._rows), torch.from_numpy(self._words[: len(self._rows)]))


def _fill(words: np.ndarray, chunks: list[Chunk]) -> None:
    first = 0
    for chunk in chunks:
        sequence, count = chunk.sequence, chunk.num_sampled
        assert sequence.matcher is not None
        unwanted = [sequence.unwanted_token_ids(draft) for draft in range(count)]
        sequence.matcher.fill(words[first : first + count], sequence.draft_token_ids, unwanted)
        first += count
