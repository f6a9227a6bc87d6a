"""What all training loops share."""

from __future__ import annotations

import sys

WARM_UP, DECAY_FROM = 0.02, 0.45  # parts of the run: up to the learning rate, from there in a straight line to 0


def learning_rate_at(part: float) -> float:
    """Of the peak: up, flat, down to 0."""
    if part < WARM_UP:
        return part / WARM_UP
    return min(1.0, (1 - part) / (1 - DECAY_FROM))


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
