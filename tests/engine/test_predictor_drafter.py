"""What the drafter makes of a step, and what the policy gets to know: with a runner and a clock that are made up."""

import pytest
from mock_model import text_inputs

from tilewright.engine.draft.drafter import PromptLookupDrafter
from tilewright.engine.draft.policy import FIRST_PAUSE_STEPS, DraftPolicy
from tilewright.engine.draft.predictor import PredictorDrafter
from tilewright.engine.schedule.sequence import Sequence, Status
from tilewright.engine.schedule.step import Chunk, Step
from tilewright.types import SamplingParams

PAGE_SIZE = 16


class Runner:
    """Drafts 7, 8, 9; a pass takes 2 seconds."""

    def __init__(self, clock):
        self.clock = clock
        self.seen = []

    def draft(self, draft_inputs):
        self.seen = draft_inputs
        self.clock.now_s += 2.0 * max(1, max(reading.num_drafts for reading in draft_inputs))
        return [[7, 8, 9][: reading.num_drafts] for reading in draft_inputs]


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Notes:
    """A policy that wants as many drafts as it is told to, and writes down what it hears."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.heard = []
        self.asked = []

    def __getattr__(self, name):
        return lambda *values: self.heard.append((name, *values))

    def choose(self, num_sequences, num_read):
        self.asked.append((num_sequences, num_read))
        return self.wanted


@pytest.fixture
def drafter():
    clock = Clock()
    return PredictorDrafter(Runner(clock), Notes(2), PromptLookupDrafter(4), PAGE_SIZE, clock)


def running(token_ids, pages=(0, 1, 2, 3)):
    sequence = Sequence("a", text_inputs(token_ids), SamplingParams())
    sequence.status, sequence.pages = Status.RUNNING, list(pages)
    return sequence


def decoding_after(drafter, token_ids, drawn, **options):
    """A sequence whose prompt was computed in a step, of which the policy heard nothing."""
    sequence = running(token_ids, **options)
    step_of(drafter, [Chunk(sequence, 0, len(token_ids))], [drawn])
    drafter.policy.heard.clear()
    return sequence


def step_of(drafter, chunks, drawn, took_s=10.0):
    """The plan of a step that draws these tokens, one for each chunk that asks for one, drafts being wrong."""
    step = Step(chunks)
    plan = drafter.plan(step)
    drafter.clock.now_s += took_s
    for chunk, token_id in zip(chunks, drawn, strict=True):
        chunk.sequence.num_computed_tokens = chunk.stop - chunk.num_drafts
        if token_id is not None:
            chunk.sequence.token_ids.append(token_id)
    drafter.draft(step, plan, lambda sequence, num_drafts: num_drafts)
    return plan


def test_each_token_is_read_with_the_one_after_it(drafter):
    """In a step with drafts and prompts: what was kept of each, and drafts where all that is known is computed."""
    decoding, beginning, ended = decoding_after(drafter, [1, 2, 3], 4), running([4, 5, 6, 7], [4]), running([1, 1], [5])
    drafter.record(decoding, 2, 0)
    drafter.policy.heard.clear()
    ended.status = Status.FINISHED
    chunks = [Chunk(decoding, 3, 3, [0, 0]), Chunk(ended, 0, 2), Chunk(beginning, 0, 3)]
    assert step_of(drafter, chunks, [5, None, None]).keeps_hidden
    found = [(item.start, item.stop, item.token_ids, item.first_row, item.num_drafts) for item in drafter.runner.seen]
    assert found == [(3, 4, [5], 0, 2), (0, 3, [5, 6, 7], 5, 0)]
    assert drafter.propose(decoding, 9) == [7, 8] and drafter.propose(decoding, 1) == [7]
    assert drafter.propose(beginning, 9) == []
    assert drafter.policy.heard == []  # a step with prompts tells nothing of what one without them takes


def test_the_policy_hears_what_steps_and_passes_take_and_what_drafts_gave(drafter):
    drafter.policy.wanted = 0
    sequence = decoding_after(drafter, [1, 2, 3], 4)
    drafter.policy.wanted = 2
    step_of(drafter, [Chunk(sequence, 3, 1)], [5])
    assert drafter.policy.heard == [("time_step", 1, 10.0), ("time_pass", 1, 2.0)]
    drafter.policy.heard.clear()
    drafter.record(sequence, 2, 1)
    assert drafter.policy.heard == [("record", 2, 1)] and (drafter.num_proposed, drafter.num_accepted) == (2, 1)
    step_of(drafter, [Chunk(sequence, 4, 3, [0, 0])], [6], took_s=12.0)
    assert drafter.policy.heard[1:] == [("time_step", 3, 12.0), ("time_pass", 1, 2.0)]
    drafter.policy.heard.clear()
    step_of(drafter, [Chunk(sequence, 5, 1)], [7])  # nobody used the drafts
    assert ("record", 2, 0) in drafter.policy.heard and drafter.num_proposed == 2


def test_without_drafts_of_its_own_the_text_is_looked_up(drafter):
    drafter.policy.wanted = None
    sequence = decoding_after(drafter, [1, 2, 3], 1)
    assert [(item.stop, item.num_drafts) for item in drafter.runner.seen] == [(3, 0)]  # prompts are read all the same
    drafter.runner.seen = []
    plan = step_of(drafter, [Chunk(sequence, 3, 1)], [2])
    assert not plan.keeps_hidden and not drafter.runner.seen
    assert drafter.propose(sequence, 2) == [3, 1]
    drafter.record(sequence, 2, 2)
    assert (drafter.num_proposed, drafter.num_accepted) == (2, 2) == (drafter.lookup.num_proposed, 2)
    assert drafter.policy.heard == [("time_step", 1, 10.0)]


def test_a_sequence_that_was_not_read_is_neither_drafted_for_nor_recorded(drafter):
    """Its answer began in a pause. One that begins afterwards, in the same steps, is read and drafted for."""
    drafter.policy.wanted = None
    unread = decoding_after(drafter, [1, 2, 3], 4)
    step_of(drafter, [Chunk(unread, 3, 1)], [9])
    drafter.policy.wanted, drafter.runner.seen = 2, []
    plan = step_of(drafter, [Chunk(unread, 4, 1)], [10])
    assert not plan.keeps_hidden and not drafter.runner.seen  # nor is there a pass for it alone
    fresh = running([4, 5, 6], [4])
    assert step_of(drafter, [Chunk(unread, 5, 1), Chunk(fresh, 0, 3)], [11, 7]).keeps_hidden
    assert [(item.sequence, item.first_row) for item in drafter.runner.seen] == [(fresh, 1)]
    assert drafter.propose(unread, 2) == [] and drafter.propose(fresh, 2) == [7, 8]
    drafter.policy.heard.clear()
    drafter.lookup.propose(unread, 2)
    drafter.record(unread, 1, 0)
    assert drafter.policy.heard == []
    assert drafter.policy.asked[-2:] == [(1, 0), (2, 1)]


def test_pages_found_again_tell_whether_they_were_read(drafter):
    """Two pages of an answer in a pause have no keys, two that were read have; a page's next use counts anew."""
    for wanted, is_read in ((None, False), (0, True), (None, False)):
        drafter.policy.wanted = wanted
        first = decoding_after(drafter, [0], 1, pages=[0, 1, 2])
        for place in range(1, 2 * PAGE_SIZE):
            step_of(drafter, [Chunk(first, place, 1)], [place])
        drafter.policy.wanted, drafter.runner.seen = 2, []
        again = running([*first.token_ids, 2], [0, 1, 3])
        step_of(drafter, [Chunk(again, 2 * PAGE_SIZE, 2)], [3])
        assert [item.sequence for item in drafter.runner.seen] == [again] * is_read


def test_a_sequence_that_is_computed_anew_is_read_anew(drafter):
    """One sent back to wait starts from its first token, or from pages that it has read."""
    drafter.policy.wanted = None
    sequence = decoding_after(drafter, [0], 1, pages=[0, 1])
    for place in range(1, 20):
        step_of(drafter, [Chunk(sequence, place, 1)], [place])
    drafter.policy.wanted, drafter.runner.seen = 2, []
    step_of(drafter, [Chunk(sequence, 20, 1)], [2])
    assert drafter.runner.seen == []
    for start, is_read in ((0, True), (PAGE_SIZE, True)):
        step_of(drafter, [Chunk(sequence, start, sequence.num_tokens - start)], [3])
        assert [item.start for item in drafter.runner.seen] == [start] * is_read
    drafter.policy.wanted = None  # now what is computed anew of its answer is missed
    step_of(drafter, [Chunk(sequence, PAGE_SIZE, sequence.num_tokens - PAGE_SIZE)], [4])
    drafter.policy.wanted, drafter.runner.seen = 2, []
    step_of(drafter, [Chunk(sequence, sequence.num_tokens - 1, 1)], [5])
    assert drafter.runner.seen == []


def test_a_few_tokens_that_were_missed_do_not_count(drafter):
    """One step of 17 that nobody read is let be, two are not."""
    sequence = decoding_after(drafter, list(range(16)), 1)
    for wanted, num_seen in ((None, 0), (2, 1), (None, 0), (2, 0)):
        drafter.policy.wanted, drafter.runner.seen = wanted, []
        step_of(drafter, [Chunk(sequence, sequence.num_tokens - 1, 1)], [1])
        assert len(drafter.runner.seen) == num_seen


def test_after_a_pause_no_sequence_goes_on_being_read_however_long_it_is(drafter):
    sequence = decoding_after(drafter, list(range(3000)), 1, pages=range(200))
    drafter.policy.wanted = None
    for _ in range(FIRST_PAUSE_STEPS):
        step_of(drafter, [Chunk(sequence, sequence.num_tokens - 1, 1)], [1])
    drafter.policy.wanted, drafter.runner.seen = 2, []
    step_of(drafter, [Chunk(sequence, sequence.num_tokens - 1, 1)], [1])
    assert drafter.runner.seen == []


def test_a_page_that_was_swapped_for_an_unread_one_is_missed(drafter):
    """The prefix cache gives a page that was computed twice back, in favour of the first one: here, of a pause."""
    drafter.policy.wanted = 2
    sequence = decoding_after(drafter, list(range(PAGE_SIZE - 1)), 1, pages=[0, 1])
    step = Step([Chunk(sequence, PAGE_SIZE - 1, 1)])
    plan = drafter.plan(step)
    sequence.pages[0], sequence.num_computed_tokens = 3, PAGE_SIZE
    sequence.token_ids.append(2)
    drafter.runner.seen = []
    drafter.draft(step, plan, lambda sequence, num_drafts: num_drafts)
    step_of(drafter, [Chunk(sequence, PAGE_SIZE, 1)], [3])
    assert drafter.runner.seen == []


class Attentive:
    """Knows what follows, each token being one more than that before, where it has read all there is; a pass takes 3.

    Of the rest, and of answers that nobody could predict, its drafts are wrong.
    """

    def __init__(self, clock):
        self.clock = clock
        self.num_read = {}
        self.is_predictable = True

    def draft(self, draft_inputs):
        drafts = []
        for item in draft_inputs:
            if item.start == self.num_read.get(item.sequence, 0):
                self.num_read[item.sequence] = item.stop
            knows = self.is_predictable and self.num_read.get(item.sequence) == item.stop
            last = item.token_ids[-1] if knows else -10
            drafts.append([last + place for place in range(1, item.num_drafts + 1)])
        self.clock.now_s += 3.0 * max(1, max(item.num_drafts for item in draft_inputs))
        return drafts


def answer(drafter, num_tokens):
    """How many drafts one answer had, of which a step takes 10, and half more for each draft."""
    sequence = running([0, 1, 2], range(num_tokens // PAGE_SIZE + 2))
    step_of(drafter, [Chunk(sequence, 0, 3)], [3])
    num_drafts = 0
    while sequence.num_tokens < num_tokens:
        drafts = drafter.propose(sequence, 4)
        following = range(sequence.num_tokens, sequence.num_tokens + len(drafts))
        num_right = len(drafts) if drafts == list(following) else 0
        step = Step([Chunk(sequence, sequence.num_tokens - 1, 1 + len(drafts), drafts)])
        plan = drafter.plan(step)
        drafter.clock.now_s += 10.0 + 0.5 * len(drafts)
        if drafts:
            drafter.record(sequence, len(drafts), num_right)
        sequence.num_computed_tokens = sequence.num_tokens + num_right
        sequence.token_ids.extend(range(sequence.num_tokens, sequence.num_computed_tokens + 1))
        drafter.draft(step, plan, lambda sequence, num_drafts: num_drafts)
        num_drafts += len(drafts)
    return num_drafts


def test_drafting_comes_back_after_poor_answers():
    """Trials begin amid answers whose beginning was never read: these are not what the predictor is judged by."""
    clock = Clock()
    drafter = PredictorDrafter(Attentive(clock), DraftPolicy(4, 32, 12), PromptLookupDrafter(4), PAGE_SIZE, clock)
    assert min(answer(drafter, 300) for _ in range(4)) > 150
    drafter.runner.is_predictable = False
    assert [answer(drafter, 300) for _ in range(4)][-1] < 20
    drafter.runner.is_predictable = True
    counts = [answer(drafter, 300) for _ in range(20)]
    assert 0 in counts[:4] and min(counts[4:]) > 150, counts
