"""How well a model foretells a text, and how far it is from another one. V: vocabulary, R: rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.engine.engine import Engine
from tilewright.engine.sampler import PromptReader
from tilewright.evaluate.windows import Window

ROWS_AT_ONCE = 64  # of log-probabilities: a few of [64, 150,000] are in memory at a time


@dataclass
class TextScore:
    """Sums over the scored tokens of a text."""

    num_tokens: int = 0
    surprise: float = 0.0  # sum of -log p
    num_compared: int = 0
    divergences: list[float] = field(default_factory=list)  # of each compared token, KL(reference || this), in nats
    num_same: int = 0  # compared tokens for which both models think the same one the likeliest

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.num_tokens)

    @property
    def mean_divergence(self) -> float | None:
        """None where nothing was compared."""
        return sum(self.divergences) / self.num_compared if self.num_compared else None

    @property
    def divergence_error(self) -> float | None:
        """The standard error of the mean."""
        if self.num_compared < 2:
            return None
        return float(torch.tensor(self.divergences, dtype=torch.float64).std()) / math.sqrt(self.num_compared)

    @property
    def share_same(self) -> float | None:
        """Of tokens for which both models think the same one the likeliest."""
        return self.num_same / self.num_compared if self.num_compared else None


class ReferenceRows:
    """The reference's log-probabilities of one window, [scored, V]: those of the next one take their place."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def read(self, engine: Engine, window: Window) -> Tensor:
        shape = (window.num_scored, engine.loaded.model.vocab_size)
        if self._rows.shape[0] < shape[0]:
            self._rows = torch.empty(shape)

        def keep(first: int, logits: Tensor) -> None:
            torch.log_softmax(logits, dim=-1, out=self._rows[first : first + logits.shape[0]])

        _read_scored(engine, window, keep)
        return self._rows[: window.num_scored]


def score_window(engine: Engine, window: Window, score: TextScore, reference: Tensor | None = None) -> None:
    """Adds the scored tokens of a window to `score`, compared with `reference`, log-probabilities [scored, V]."""
    targets = torch.tensor(window.token_ids[window.first_scored :])

    def add(first: int, logits: Tensor) -> None:
        found = torch.log_softmax(logits, dim=-1)
        end = first + logits.shape[0]
        score.surprise -= float(found.gather(1, targets[first:end, None]).double().sum())
        score.num_tokens += logits.shape[0]
        if reference is None:
            return
        expected = reference[first:end]
        # A token that the reference excludes (-inf) weighs nothing: 0 * inf would be NaN.
        apart = torch.where(expected > -math.inf, expected.exp() * (expected - found), 0.0)
        score.divergences += apart.sum(dim=-1, dtype=torch.float64).tolist()
        score.num_same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        score.num_compared += logits.shape[0]

    _read_scored(engine, window, add)


def _read_scored(engine: Engine, window: Window, read: PromptReader) -> None:
    """read(i, logits) for the scored tokens of a window, i counted from the first of them, ROWS_AT_ONCE at a time."""

    def read_part(first: int, logits: Tensor) -> None:
        skipped = max(0, window.first_scored - first)
        first += skipped
        for part in logits[skipped:].split(ROWS_AT_ONCE):
            read(first - window.first_scored, part)
            first += part.shape[0]

    engine.read_logits(window.token_ids, read_part)
