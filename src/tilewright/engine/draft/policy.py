"""How many tokens to draft, so that the most come out in a second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import mul

from tilewright.engine.draft.durations import Durations

# Three of four drafts are thought to be right until they are seen, and that weighs as much as 2 that were seen. Of
# those the latest thirty or so count.
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
class _BatchSizeTrial:
    """What goes for about so many sequences at once: with one a row more is nearly free, with twenty it is not."""

    untimed_left: int = FIRST_PAUSE_STEPS  # steps that are read in the hope of one that tells what it takes
    trial_left: int = TRIAL_STEPS
    pause_left: int = 0  # steps
    next_pause: int = FIRST_PAUSE_STEPS
    num_good: int = 0  # steps since, after which drafts were made because they pay


class DraftPolicy:
    """Chooses a number of drafts by how often those at each place were right, and how long steps and passes take.

    Nothing here changes an answer: right drafts are what would have come anyway. `max_drafts` are those of a sequence;
    a step has `max_rows` rows with them, and `max_drafts_in_all` of them, at most.
    """

    def __init__(self, max_drafts: int, max_rows: int, max_drafts_in_all: int) -> None:
        self.max_drafts = max_drafts
        self.max_rows = max_rows
        self.max_drafts_in_all = max_drafts_in_all
        self._step_s = Durations()  # by rows
        self._pass_s = Durations()  # by sequences
        self._num_tried: list[float] = []  # by place, those whose drafts before were right
        self._num_right: list[float] = []
        self._forget()
        self._trials: defaultdict[int, _BatchSizeTrial] = defaultdict(_BatchSizeTrial)  # by powers of two

    def choose(self, num_sequences: int, num_read: int) -> int | None:
        """How many tokens to draft after the step that begins, for those of its sequences that the predictor has read.

        None: nothing is drafted for a while, and the predictor need not read answers. After that it reads those again
        that begin from then on: while none of the sequences was read, a trial waits.
        """
        num_spare_rows = min(self.max_rows - num_sequences, self.max_drafts_in_all)
        most = min(self.max_drafts, num_spare_rows // max(1, num_read))
        if most < 1:
            return None
        crowd = self._trials[num_sequences.bit_length()]
        if crowd.pause_left:
            crowd.pause_left -= 1
            return None
        if not self._step_s.reaches_down_to(num_sequences):
            # What a step takes without drafts is what they are held against; beside prompts it never shows.
            crowd.untimed_left -= 1
            return 0 if crowd.untimed_left >= 0 else None
        if not num_read:
            return 0
        if crowd.trial_left:
            crowd.trial_left -= 1
            return 1
        best = max(range(most + 1), key=lambda count: self._tokens_per_s(num_sequences, num_read, count))
        if best:
            crowd.num_good += 1
            if crowd.num_good == GOOD_STEPS:
                crowd.next_pause = FIRST_PAUSE_STEPS
            return best
        self._trials[num_sequences.bit_length()] = _BatchSizeTrial(
            pause_left=crowd.next_pause - 1, next_pause=min(2 * crowd.next_pause, LONGEST_PAUSE_STEPS)
        )
        self._forget()
        return None

    def record(self, num_proposed: int, num_right: int) -> None:
        """Counts the drafts of a sequence in a step, of which the first `num_right` were right."""
        for place in range(self.max_drafts):
            # Places that are not tried are forgotten too, so that they are tried again after a hundred or so.
            self._num_tried[place] *= MEMORY
            self._num_right[place] *= MEMORY
            if place < num_proposed and place <= num_right:
                self._num_tried[place] += 1
                self._num_right[place] += place < num_right

    def time_step(self, num_rows: int, took_s: float) -> None:
        """Learns from a step that decoded and did nothing else."""
        if num_rows <= self.max_rows:
            self._step_s.add(num_rows, took_s)

    def time_pass(self, num_sequences: int, took_s: float) -> None:
        """Learns from a pass of the predictor that drafted a token for each of so many sequences."""
        self._pass_s.add(num_sequences, took_s)

    def rates(self) -> Iterator[float]:
        """How often the draft at each place is right when those before it are: as those before, until it is seen."""
        rate = EXPECTED_RATE
        for num_right, num_tried in zip(self._num_right, self._num_tried, strict=True):
            rate = (num_right + EXPECTED_WEIGHT * rate) / (num_tried + EXPECTED_WEIGHT)
            yield rate

    def _tokens_per_s(self, num_sequences: int, num_read: int, num_drafts: int) -> float:
        """What all gain in a second when those that were read have so many drafts; the best is hoped of the untimed."""
        num_right = sum(accumulate(islice(self.rates(), num_drafts), mul))
        took_s = self._step_s.of(num_sequences + num_read * num_drafts) + num_drafts * self._pass_s.of(num_read)
        return (num_sequences + num_read * num_right) / took_s

    def _forget(self) -> None:
        """Makes the next trial one without prejudice: drafts that were all wrong may be of an answer that has ended."""
        self._num_tried = [0.0] * self.max_drafts
        self._num_right = [0.0] * self.max_drafts
