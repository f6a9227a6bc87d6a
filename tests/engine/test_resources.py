"""A sequence is admitted by all resources or by none."""

from mock_model import text_inputs

from tilewright.engine.load.assembly import build_resources
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import StepLimits
from tilewright.types import SamplingParams

LIMITS = StepLimits(max_context=100)


def sequence_of(token_ids):
    return Sequence("request", text_inputs(token_ids), SamplingParams(temperature=0.0))


def computed(resources, token_ids):
    """A sequence that was admitted, computed and released: its full pages are in the prefix cache."""
    sequence = sequence_of(token_ids)
    assert resources.admit(sequence) == 0
    assert resources.reserve(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    resources.kv.commit(sequence)
    resources.release(sequence)


def test_a_sequence_that_one_resource_has_no_room_for_holds_nothing_of_the_others():
    resources = build_resources(LIMITS, num_pages=20, page_size=4, num_state_slots=2)  # one may run
    first, second = sequence_of(range(1, 10)), sequence_of(range(1, 10))
    assert resources.admit(first) == 0 and resources.reserve(first, 9)
    first.num_computed_tokens = 9
    resources.kv.commit(first)  # the second finds its two full pages, but no slot
    num_used, num_looked_up = resources.kv.pool.num_used, resources.kv.prefix_cache.num_tokens_looked_up
    assert resources.admit(second) is None
    assert not second.pages and second.state_slots is None
    assert resources.kv.pool.num_used == num_used == 3
    assert resources.kv.prefix_cache.num_tokens_looked_up == num_looked_up == 9
    resources.release(first)
    assert resources.admit(second) is not None
    assert second.state_slots is not None and resources.states.num_running == 1


def test_a_match_counts_as_far_as_all_resources_have_it():
    tokens = range(1, 20)
    plain = build_resources(LIMITS, num_pages=20, page_size=4)
    recurrent = build_resources(LIMITS, num_pages=20, page_size=4, num_state_slots=8)
    for resources in (plain, recurrent):
        computed(resources, tokens)
    again = sequence_of(tokens)
    assert plain.admit(again) == 16 and len(again.pages) == 4
    without_snapshot = sequence_of(tokens)
    assert recurrent.admit(without_snapshot) == 0  # pages without a state are of no use
    assert not without_snapshot.pages and without_snapshot.branch_border == 16
    assert recurrent.kv.pool.num_used == 0


def test_room_is_kept_for_what_admitted_sequences_still_need():
    resources = build_resources(LIMITS, num_pages=8, page_size=4)
    long, short, tiny = sequence_of(range(20)), sequence_of(range(8)), sequence_of(range(3))
    assert resources.admit(long) == 0  # it will need five pages, and one more for its answer
    assert resources.admit(short) == 0  # two of the eight are left
    assert resources.admit(tiny) is None
    resources.release(short)
    assert resources.admit(tiny) == 0


def test_what_models_without_recurrent_layers_lack_is_absent():
    plain = build_resources(LIMITS, num_pages=8, page_size=4)
    recurrent = build_resources(LIMITS, num_pages=8, page_size=4, num_state_slots=8)
    assert plain.can_repeat_steps and not recurrent.can_repeat_steps
    assert plain.draft_room() > recurrent.draft_room() == 8 and recurrent.max_drafts_per_step == 2
    assert "num_state_slots" not in plain.stats() and recurrent.stats()["num_state_slots"] == 8
