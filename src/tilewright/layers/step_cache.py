"""Blocks of a diffusion transformer that are skipped where a step changes little: first-block caching.

Steps follow each other closely, and so do what the blocks add to the hidden state. The first block is always computed;
if what it adds has changed by less than a threshold since the last step that was computed whole, the other blocks are
taken to add what they added then. An approximation: off unless a request asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class StepCache:
    """What the blocks of one run added, at the last step that was computed whole."""

    def __init__(self, threshold: float) -> None:
        """`threshold` is the mean change of what the first block adds, relative to its mean size; 0 reuses nothing."""
        self.threshold = threshold
        self.num_computed = self.num_reused = 0
        self._first: Tensor | None = None
        self._rest: Tensor | None = None

    def run(self, x: Tensor, first: Callable[[], object], rest: Callable[[], object]) -> None:
        """x, updated in place by `first` and `rest`, or by `first` and what `rest` added before."""
        if self.threshold <= 0:
            first()
            rest()
            return
        before = x.clone()
        first()
        added = x - before
        if self._first is not None and self._rest is not None and self._is_close(added, self._first):
            x += self._rest
            self.num_reused += 1
            return
        self._first, before = added, x.clone()
        rest()
        self._rest = x - before
        self.num_computed += 1

    def _is_close(self, added: Tensor, last: Tensor) -> bool:
        if added.shape != last.shape:
            return False
        change = (added - last).abs().mean(dtype=torch.float32)
        return bool(change < self.threshold * last.abs().mean(dtype=torch.float32))
