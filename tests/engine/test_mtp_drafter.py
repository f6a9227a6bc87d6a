"""What the drafter makes of a step, and what the policy gets to know: with a runner and a clock that are made up."""

import pytest
from mock_model import text_inputs

from tilewright.engine.mtp_drafter import MtpDrafter
from tilewright.engine.sequence import Sequence, Status
from tilewright.engine.speculate import Speculator
from tilewright.engine.step import Chunk, Step
from tilewright.types import SamplingParams


class Runner:
    """Drafts 7, 8, 9; a pass takes 2 seconds."""

    keeps_hidden = False

    def __init__(self, clock):
        self.clock = clock
        self.seen = []

    def draft(self, readings):
        self.seen = readings
        self.clock.now_s += 2.0 * max(1, max(reading.num_drafts for reading in readings))
        return [[7, 8, 9][: reading.num_drafts] for reading in readings]


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Notes:
    """A policy that wants as many drafts as it is told to, and writes down what it hears."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.heard = []

    def __getattr__(self, name):
        return lambda *values: self.heard.append((name, *values))

    def choose(self, num_sequences):
        return self.wanted


@pytest.fixture
def drafter():
    clock = Clock()
    return MtpDrafter(Runner(clock), Notes(2), Speculator(4), clock)


def running(token_ids, num_computed=0):
    sequence = Sequence("a", text_inputs(token_ids), SamplingParams())
    sequence.status, sequence.num_computed_tokens = Status.RUNNING, num_computed
    return sequence


def step_of(drafter, chunks, drawn, took_s=10.0):
    """A step that draws these tokens, one for each chunk that asks for one, drafts being wrong."""
    step = Step(chunks)
    drafter.begin(step)
    drafter.clock.now_s += took_s
    for chunk, token_id in zip(chunks, drawn, strict=True):
        chunk.sequence.num_computed_tokens = chunk.stop - chunk.num_drafts
        if token_id is not None:
            chunk.sequence.token_ids.append(token_id)
    drafter.draft(step, lambda sequence, num_drafts: num_drafts)


def test_each_token_is_read_with_the_one_after_it(drafter):
    """In a step with drafts and prompts: what was kept of each, and drafts where all that is known is computed."""
    decoding, beginning, ended = running([1, 2, 3], 3), running([4, 5, 6, 7]), running([1, 1])
    decoding.token_ids.append(4)
    ended.status = Status.FINISHED
    step_of(drafter, [Chunk(decoding, 3, 3, 2), Chunk(ended, 0, 2), Chunk(beginning, 0, 3)], [5, None, None])
    assert drafter.runner.keeps_hidden
    found = [(item.start, item.stop, item.token_ids, item.first_row, item.num_drafts) for item in drafter.runner.seen]
    assert found == [(3, 4, [5], 0, 2), (0, 3, [5, 6, 7], 5, 0)]
    assert drafter.propose(decoding, 9) == [7, 8] and drafter.propose(decoding, 1) == [7]
    assert drafter.propose(beginning, 9) == []
    assert drafter.policy.heard == []  # a step with prompts tells nothing of what one without them takes


def test_the_policy_hears_what_steps_and_passes_take_and_what_drafts_gave(drafter):
    sequence = running([1, 2, 3], 3)
    sequence.token_ids.append(4)
    step_of(drafter, [Chunk(sequence, 3, 1)], [5])
    assert drafter.policy.heard == [("time_step", 1, 10.0), ("time_pass", 1, 2.0)]
    drafter.policy.heard.clear()
    drafter.record(sequence, 2, 1)
    assert drafter.policy.heard == [("record", 2, 1)] and (drafter.num_proposed, drafter.num_accepted) == (2, 1)
    step_of(drafter, [Chunk(sequence, 4, 3, 2)], [6], took_s=12.0)
    assert drafter.policy.heard[1:] == [("time_step", 3, 12.0), ("time_pass", 1, 2.0)]
    drafter.policy.heard.clear()
    step_of(drafter, [Chunk(sequence, 5, 1)], [7])  # nobody used the drafts
    assert ("record", 2, 0) in drafter.policy.heard and drafter.num_proposed == 2


def test_without_drafts_of_its_own_the_text_is_looked_up(drafter):
    drafter.policy.wanted = None
    sequence = running([1, 2, 3, 1], 3)
    step_of(drafter, [Chunk(sequence, 3, 1)], [2])
    assert not drafter.runner.keeps_hidden and not drafter.runner.seen
    assert drafter.propose(sequence, 2) == [3, 1]
    drafter.record(sequence, 2, 2)
    assert (drafter.num_proposed, drafter.num_accepted) == (2, 2) == (drafter.lookup.num_proposed, 2)
    assert drafter.policy.heard == [("time_step", 1, 10.0)]
