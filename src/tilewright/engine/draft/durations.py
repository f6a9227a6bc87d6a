"""How long work of a size takes, learnt as it is done."""

from __future__ import annotations

from collections import deque
from statistics import median

# The median of so many is not moved by the seconds that another program had the cores for, and follows a context that
# grows. The first ones are slower (a shape is recorded then), so that a single one says nothing.
KEPT = 15
ENOUGH = 3


class Durations:
    """Typical seconds by size: medians of the latest."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}  # of the sizes that were seen often enough, smallest first

    def add(self, size: int, took_s: float) -> None:
        latest = self._latest.setdefault(size, deque(maxlen=KEPT))
        latest.append(took_s)
        if len(latest) >= ENOUGH:
            is_new = size not in self._typical
            self._typical[size] = median(latest)
            if is_new:
                self._typical = dict(sorted(self._typical.items()))

    def reaches_down_to(self, size: int) -> bool:
        """Whether this or a smaller size is known."""
        return bool(self._typical) and next(iter(self._typical)) <= size

    def of(self, size: int) -> float:
        """Seconds of a size: on a line between its neighbours, beyond them as the last. 0.0 while none is known."""
        below: tuple[int, float] | None = None
        for known, took_s in self._typical.items():
            if known >= size:
                if below is None or known == size:
                    return took_s
                share = (size - below[0]) / (known - below[0])
                return below[1] + share * (took_s - below[1])
            below = known, took_s
        return below[1] if below else 0.0
