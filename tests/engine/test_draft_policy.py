"""How many tokens are drafted, by rates and times that are made up: no clock is read."""

import pytest

from tilewright.engine.draft.policy import (
    ENOUGH,
    FIRST_PAUSE_STEPS,
    KEPT,
    LONGEST_PAUSE_STEPS,
    TRIAL_STEPS,
    DraftPolicy,
    Durations,
)


class World:
    """Steps of which each row and each pass takes its time, with drafts that are right at a rate, evenly spread."""

    def __init__(self, policy, rate, *, step_s=1.0, row_s=0.02, pass_s=0.1):
        self.policy, self.rate = policy, rate
        self.step_s, self.row_s, self.pass_s = step_s, row_s, pass_s
        self.debt = 0.0
        self.num_drafts = 0  # made after the last step
        self.now_s = 0.0
        self.num_tokens = 0

    def step(self, num_sequences=1, num_read=None):
        """What the policy chose; all sequences were read, unless it is said how many."""
        chosen = self.policy.choose(num_sequences, num_sequences if num_read is None else num_read)
        num_rows = num_sequences * (1 + self.num_drafts)
        took_s = self.step_s + self.row_s * num_rows
        for _ in range(num_sequences):
            num_right = self.num_right()
            if self.num_drafts:
                self.policy.record(self.num_drafts, num_right)
            self.num_tokens += 1 + num_right
        self.policy.time_step(num_rows, took_s)
        self.num_drafts = chosen or 0
        if self.num_drafts:
            self.policy.time_pass(num_sequences, self.pass_s)
        self.now_s += took_s + self.num_drafts * self.pass_s
        return chosen

    def num_right(self):
        for place in range(self.num_drafts):
            self.debt += self.rate
            if self.debt < 1:
                return place
            self.debt -= 1
        return self.num_drafts

    def run(self, num_steps, num_sequences=1):
        return [self.step(num_sequences) for _ in range(num_steps)]


def policy_of(max_drafts=4, max_rows=32, max_drafts_in_all=32):
    return DraftPolicy(max_drafts, max_rows, max_drafts_in_all)


def test_drafts_that_are_right_are_made_from_the_start():
    world = World(policy_of(), rate=0.95)
    chosen = world.run(200)
    assert chosen[:ENOUGH] == [0] * ENOUGH  # read, but first it is seen what a step takes
    assert chosen[ENOUGH : ENOUGH + TRIAL_STEPS] == [1] * TRIAL_STEPS
    assert min(chosen[ENOUGH:]) >= 1 and chosen[50:] == [4] * 150
    assert world.num_tokens / world.now_s > 2 / (world.step_s + world.row_s)


def test_drafts_that_are_wrong_are_given_up_at_once_and_cost_next_to_nothing():
    world = World(policy_of(), rate=0.0)
    chosen = world.run(20_000)
    assert chosen[ENOUGH + 14] is None
    assert sum(bool(count) for count in chosen) < 140
    without_s = 20_000 * (world.step_s + world.row_s)
    assert world.num_tokens == 20_000 and world.now_s < 1.002 * without_s


def test_pauses_grow_and_end_with_a_trial():
    world = World(policy_of(), rate=0.0)
    pauses, length = [], 0
    for chosen in world.run(40_000):
        if chosen is None:
            length += 1
        elif length:
            pauses.append(length)
            length = 0
    assert pauses[:4] == [FIRST_PAUSE_STEPS * 2**power for power in range(4)]
    assert pauses[-1] == LONGEST_PAUSE_STEPS


def test_beside_prompts_without_end_nothing_is_drafted_or_read():
    """Steps with prompts in them tell nothing of what a draft costs."""
    policy = policy_of()
    chosen = [policy.choose(3, 3) for _ in range(200)]
    assert chosen == [0] * FIRST_PAUSE_STEPS + [None] * (200 - FIRST_PAUSE_STEPS)


def test_drafts_that_become_right_are_found_out():
    world = World(policy_of(), rate=0.0)
    world.run(300)
    world.rate = 0.9
    chosen = world.run(1200)
    assert all(chosen[-300:])
    world.rate = 0.0  # and the next pause is a short one again
    assert None in world.run(120) and world.policy._by_batch_size[1].next_pause == 2 * FIRST_PAUSE_STEPS


def test_a_trial_waits_for_a_sequence_that_was_read():
    """Nothing is learnt or spent meanwhile; what then comes is tried as ever."""
    policy = policy_of()
    world = World(policy, rate=0.0)
    while world.step() is not None:
        pass
    next_pause = policy._by_batch_size[1].next_pause
    world.run(FIRST_PAUSE_STEPS - 1)
    assert [world.step(num_read=0) for _ in range(500)] == [0] * 500
    assert policy._by_batch_size[1].num_good == 0 and policy._by_batch_size[1].next_pause == next_pause
    assert world.run(TRIAL_STEPS) == [1] * TRIAL_STEPS


def test_drafts_of_a_few_among_many_are_held_against_what_all_wait_for():
    """Four rows more in a step of eight are next to nothing, eight or more are not: one may draft, all may not."""
    for num_read, pays in ((1, True), (8, False)):
        world = World(policy_of(max_rows=64), rate=0.8, row_s=0.0)
        took_s = {8: 1.0, 9: 1.01, 10: 1.02, 11: 1.03, 12: 1.04}
        for num_rows in (8, 9, 10, 11, 12, 16, 24, 32, 40):
            for _ in range(ENOUGH):
                world.policy.time_step(num_rows, took_s.get(num_rows, 5.0))
        for _ in range(ENOUGH):
            world.policy.time_pass(num_read, 0.001)
        chosen = [world.policy.choose(8, num_read) for _ in range(TRIAL_STEPS + 1)]
        assert bool(chosen[-1]) == pays


@pytest.mark.parametrize(
    "rate, pass_s, row_s, expected",
    [
        (0.9, 0.01, 0.0, 4),  # as good as free
        (0.6, 0.4, 0.02, 1),  # a small model, whose head is a third of it: the second would not pay
        (0.3, 0.4, 0.02, None),
        (0.8, 0.1, 10.0, None),  # all the time goes into rows
    ],
)
def test_as_many_as_pay(rate, pass_s, row_s, expected):
    world = World(policy_of(), rate, pass_s=pass_s, row_s=row_s)
    chosen = world.run(600)[400:]
    assert sorted(chosen, key=lambda count: count or 0)[100] == expected


def test_with_many_sequences_rows_become_dear_and_nobody_else_pays_for_it():
    world = World(policy_of(), rate=0.8, row_s=0.0)
    assert world.run(100)[-1] == 4
    world.row_s = 0.5
    assert None in world.run(60, num_sequences=8)
    assert world.run(60, num_sequences=8).count(None) > 20
    world.row_s = 0.0
    assert world.run(1)[-1] == 4  # one sequence alone has lost nothing


def test_no_more_than_there_is_room_for():
    policy = policy_of(max_rows=10, max_drafts_in_all=6)
    for num_sequences, most in ((1, 4), (2, 3), (3, 2), (5, 1)):
        world = World(policy, rate=1.0, row_s=0.0, pass_s=0.0)
        assert max(world.run(20, num_sequences)) == most
    assert policy.choose(6, 6) is None and policy.choose(50, 50) is None
    assert policy.choose(50, 0) is None


def test_a_place_that_was_given_up_is_tried_again():
    policy = policy_of(max_drafts=2)
    for _ in range(100):
        policy.record(2, 1)
    first, second = policy.rates()
    assert first > 0.95 and second < 0.1
    for _ in range(400):
        policy.record(1, 1)
    assert list(policy.rates())[1] > 0.5


def test_durations_are_medians_of_the_latest():
    durations = Durations()
    assert durations.of(3) == 0.0 and not durations.reaches_down_to(100)
    for took_s in (9.0, 1.0, 1.0):
        assert durations.of(4) == 0.0  # one alone says nothing
        durations.add(4, took_s)
    assert durations.of(4) == 1.0 and durations.of(1) == durations.of(50) == 1.0
    assert durations.reaches_down_to(4) and not durations.reaches_down_to(3)
    for _ in range(ENOUGH):
        durations.add(8, 3.0)
    assert durations.of(6) == 2.0 and durations.of(8) == durations.of(9) == 3.0
    for _ in range(KEPT // 2 + 1):
        durations.add(4, 2.0)
    assert durations.of(4) == 2.0  # what was long ago does not count
