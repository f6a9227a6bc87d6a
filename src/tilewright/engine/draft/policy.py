"""Chooses the number of tokens to draft for the highest throughput, from measured durations of steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import mul
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


# The prior: three of four drafts are accepted, with the weight of 2 observations. Of observations the latest thirty
# or so count.
EXPECTED_RATE = 0.75
EXPECTED_WEIGHT = 2.0
MEMORY = 0.97
# A token is tried in 4 steps, as many as tell what it takes; then more, as long as it pays. When it does not, nothing
# is drafted for 64 steps, then it is tried as at first. Each further pause is twice as long, up to one beside which
# trials are a thousandth of the time.
TRIAL_STEPS = 4
FIRST_PAUSE_STEPS = 64
LONGEST_PAUSE_STEPS = 4096
# So many steps on end it must pay for the next pause to be a short one again: expectations alone last for some four.
GOOD_STEPS = 32


@dataclass
class _BatchSizeState:
    """Trials and pauses for one batch size: with one sequence a row more is nearly free, with twenty it is not."""

    untimed_left: int = FIRST_PAUSE_STEPS  # steps that the predictor reads while no step without drafts was timed
    trial_left: int = TRIAL_STEPS
    pause_left: int = 0  # steps
    next_pause: int = FIRST_PAUSE_STEPS
    num_good: int = 0  # steps since, after which drafts were made because they pay


class DraftPolicy:
    """Chooses a number of drafts by how often those at each place were accepted, and how long steps and passes take.

    Nothing here changes an answer: accepted drafts are what would have been sampled anyway. A sequence has at most
    `max_drafts`, a step at most `max_drafts_in_all` and, with them, `max_rows` rows.
    """

    def __init__(self, max_drafts: int, max_rows: int, max_drafts_in_all: int) -> None:
        self.max_drafts = max_drafts
        self.max_rows = max_rows
        self.max_drafts_in_all = max_drafts_in_all
        self._step_s = Durations()  # by rows
        self._pass_s = Durations()  # by sequences
        self._num_tried: list[float] = []  # by place, those whose earlier drafts were accepted
        self._num_accepted: list[float] = []
        self._forget()
        self._by_batch_size: defaultdict[int, _BatchSizeState] = defaultdict(_BatchSizeState)  # by powers of two

    def choose(self, num_sequences: int, num_read: int) -> int | None:
        """How many tokens to draft after the step that begins, for those of its sequences that the predictor has read.

        None: nothing is drafted for a while, and the predictor need not read answers. After that it reads those again
        that begin from then on: while none of the sequences was read, a trial waits.
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
            # Drafts are compared with the time of a step without them, which cannot be measured beside prompts.
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
        """Counts the drafts of a sequence in a step, of which the first `num_accepted` were accepted."""
        for place in range(self.max_drafts):
            # Places that are not tried are forgotten too, so that they are tried again after a hundred or so.
            self._num_tried[place] *= MEMORY
            self._num_accepted[place] *= MEMORY
            if place < num_proposed and place <= num_accepted:
                self._num_tried[place] += 1
                self._num_accepted[place] += place < num_accepted

    def time_step(self, num_rows: int, took_s: float) -> None:
        """Learns from a step that decoded and did nothing else."""
        if num_rows <= self.max_rows:
            self._step_s.add(num_rows, took_s)

    def time_pass(self, num_sequences: int, took_s: float) -> None:
        """Learns from a pass of the predictor that drafted a token for each of so many sequences."""
        self._pass_s.add(num_sequences, took_s)

    def rates(self) -> Iterator[float]:
        """How often the draft at each place is accepted if those before it are; as those before, until it was tried."""
        rate = EXPECTED_RATE
        for num_accepted, num_tried in zip(self._num_accepted, self._num_tried, strict=True):
            rate = (num_accepted + EXPECTED_WEIGHT * rate) / (num_tried + EXPECTED_WEIGHT)
            yield rate

    def _tokens_per_s(self, num_sequences: int, num_read: int, num_drafts: int) -> float:
        """Tokens per second if each sequence that was read has so many drafts.

        Sizes that were never timed get an optimistic estimate.
        """
        num_accepted = sum(accumulate(islice(self.rates(), num_drafts), mul))
        took_s = self._step_s.of(num_sequences + num_read * num_drafts) + num_drafts * self._pass_s.of(num_read)
        return (num_sequences + num_read * num_accepted) / took_s

    def _forget(self) -> None:
        """Starts the next trial from the prior: drafts that were all rejected may be of an answer that has ended."""
        self._num_tried = [0.0] * self.max_drafts
        self._num_accepted = [0.0] * self.max_drafts
