"""Chooses the number of tokens to draft for the highest throughput, from measured durations of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import mul
from statistics import median

# The median of 15 is not moved by the seconds in which another program had the cores, and follows a growing context.
# The first durations are longer (a shape is recorded then), so that a single one is not enough.
KEPT = 15
ENOUGH = 3


class Durations:
    """Typical seconds by size: medians of the latest durations."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}  # sizes with enough durations, smallest first

    def add(self, size: int, took_s: float) -> None:
        latest = self._latest.setdefault(size, deque(maxlen=KEPT))
        latest.append(took_s)
        if len(latest) >= ENOUGH:
            is_new = size not in self._typical
            self._typical[size] = median(latest)
            if is_new:
                self._typical = dict(sorted(self._typical.items()))

    def reaches_down_to(self, size: int) -> bool:
        """Return whether this or a smaller size is known."""
        return bool(self._typical) and next(iter(self._typical)) <= size

    def of(self, size: int) -> float:
        """Return the seconds of a size: linear between known sizes, constant beyond them; 0.0 while none is known."""
        below: tuple[int, float] | None = None
        for known, took_s in self._typical.items():
            if known >= size:
                if below is None or known == size:
                    return took_s
                share = (size - below[0]) / (known - below[0])
                return below[1] + share * (took_s - below[1])
            below = known, took_s
        return below[1] if below else 0.0


# The prior: three of four drafts are accepted, with the weight of 2 observations. Older observations fade; about the
# latest thirty count.
EXPECTED_RATE = 0.75
EXPECTED_WEIGHT = 2.0
MEMORY = 0.97
# One draft is tried in 4 steps, enough to measure its time; then more, as long as it pays. When it does not, nothing is
# drafted for 64 steps, then one is tried again. Each further pause is twice as long, up to 4,096 steps, beside which
# trials are a thousandth of the time.
TRIAL_STEPS = 4
FIRST_PAUSE_STEPS = 64
LONGEST_PAUSE_STEPS = 4096
# Drafting must pay for this many steps in a row before the next pause is short again: the prior alone lasts for some
# four.
GOOD_STEPS = 32


@dataclass
class _BatchSizeState:
    """Trials and pauses for one batch size: with one sequence a row more is nearly free, with twenty it is not."""

    untimed_left: int = FIRST_PAUSE_STEPS  # steps that the predictor reads until a step without drafts was timed
    trial_left: int = TRIAL_STEPS
    pause_left: int = 0  # steps
    next_pause: int = FIRST_PAUSE_STEPS
    num_good: int = 0  # steps since then, after which drafts were made because they pay


class DraftPolicy:
    """Chooses the number of drafts from their acceptance rate at each place and the time of steps and passes.

    Nothing here changes an answer: accepted drafts are the tokens that would have been sampled anyway. A sequence has
    at most `max_drafts`, a step at most `max_drafts_in_all` and, with them, `max_rows` rows.
    """

    def __init__(self, max_drafts: int, max_rows: int, max_drafts_in_all: int) -> None:
        self.max_drafts = max_drafts
        self.max_rows = max_rows
        self.max_drafts_in_all = max_drafts_in_all
        self._step_s = Durations()  # by rows
        self._pass_s = Durations()  # by sequences
        self._num_tried: list[float] = []  # by place: drafts whose earlier drafts were all accepted
        self._num_accepted: list[float] = []
        self._forget()
        self._by_batch_size: defaultdict[int, _BatchSizeState] = defaultdict(_BatchSizeState)  # by powers of two

    def choose(self, num_sequences: int, num_read: int) -> int | None:
        """Return how many tokens to draft after this step for each sequence that the predictor has read; None to pause.

        In a pause the predictor need not read answers. Afterwards it reads only sequences that begin from then on:
        while there are none, a trial waits.
        """
        num_spare_rows = min(self.max_rows - num_sequences, self.max_drafts_in_all)
        most = min(self.max_drafts, num_spare_rows // max(1, num_read))
        if most < 1:
            return None
        trial = self._by_batch_size[num_sequences.bit_length()]
        if trial.pause_left:
            trial.pause_left -= 1
            return None
        if not self._step_s.reaches_down_to(num_sequences):
            # Drafting is compared with the time of a step without drafts, which cannot be measured beside prompts.
            trial.untimed_left -= 1
            return 0 if trial.untimed_left >= 0 else None
        if not num_read:
            return 0
        if trial.trial_left:
            trial.trial_left -= 1
            return 1
        best = max(range(most + 1), key=lambda count: self._tokens_per_s(num_sequences, num_read, count))
        if best:
            trial.num_good += 1
            if trial.num_good == GOOD_STEPS:
                trial.next_pause = FIRST_PAUSE_STEPS
            return best
        self._by_batch_size[num_sequences.bit_length()] = _BatchSizeState(
            pause_left=trial.next_pause - 1, next_pause=min(2 * trial.next_pause, LONGEST_PAUSE_STEPS)
        )
        self._forget()
        return None

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """Count a sequence's drafts of one step, of which the first `num_accepted` were accepted."""
        for place in range(self.max_drafts):
            # Counts of untried places fade too, so that they are tried again after a hundred steps or so.
            self._num_tried[place] *= MEMORY
            self._num_accepted[place] *= MEMORY
            if place < num_proposed and place <= num_accepted:
                self._num_tried[place] += 1
                self._num_accepted[place] += place < num_accepted

    def time_step(self, num_rows: int, took_s: float) -> None:
        """Record the time of a step that only decoded."""
        if num_rows <= self.max_rows:
            self._step_s.add(num_rows, took_s)

    def time_pass(self, num_sequences: int, took_s: float) -> None:
        """Record the time of a predictor pass that drafted a token for each of `num_sequences` sequences."""
        self._pass_s.add(num_sequences, took_s)

    def rates(self) -> Iterator[float]:
        """Yield the acceptance rate at each place, given that the earlier drafts of the sequence were accepted.

        A place that was not tried yet starts from the rate of the place before it.
        """
        rate = EXPECTED_RATE
        for num_accepted, num_tried in zip(self._num_accepted, self._num_tried, strict=True):
            rate = (num_accepted + EXPECTED_WEIGHT * rate) / (num_tried + EXPECTED_WEIGHT)
            yield rate

    def _tokens_per_s(self, num_sequences: int, num_read: int, num_drafts: int) -> float:
        """Return tokens per second if each read sequence has `num_drafts` drafts.

        Sizes that were never timed get an optimistic estimate.
        """
        num_accepted = sum(accumulate(islice(self.rates(), num_drafts), mul))
        took_s = self._step_s.of(num_sequences + num_read * num_drafts) + num_drafts * self._pass_s.of(num_read)
        return (num_sequences + num_read * num_accepted) / took_s

    def _forget(self) -> None:
        """Reset the counts to the prior for the next trial: the rejected drafts may be of an answer that has ended."""
        self._num_tried = [0.0] * self.max_drafts
        self._num_accepted = [0.0] * self.max_drafts
