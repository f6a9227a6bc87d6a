"""The embedded model answers right, through the server, and as transformers does."""

import itertools
import json
import math
from collections import defaultdict

import pytest

from tilewright.weights import embedded
from training.tiny_vl import askers, evaluate, items
from training.tiny_vl.score import Share, is_same

NUM_ASKED = 100
NUM_COMPARED = 25
MAX_SHARD_BYTES = 16 * 10**6
# (kinds, the least share of right answers): loose, as a group has only some tens of the hundred.
FLOORS = {
    "shapes": ({"count", "colour", "position", "describe", "size"}, 0.95),
    "reading": ({"read", "find"}, 0.9),
    "charts, two pictures, clips": ({"chart", "two_pictures", "clip"}, 0.9),
    "refusals": ({"refusal"}, 0.8),
}
OTHERS = {"text"}  # counted among all


@pytest.fixture(scope="module")
def answers():
    with askers.of_own_server(embedded.path(), "bfloat16") as ask:
        return evaluate.ask_all(items.test(NUM_ASKED), NUM_ASKED, ask, askers.CONCURRENCY)


def test_every_kind_is_held_to_something(answers):
    known = set.union(OTHERS, *(kinds for kinds, _ in FLOORS.values()))
    assert {answer.kind for answer in answers} <= known


@pytest.mark.parametrize("group", FLOORS)
def test_answers_are_right(group, answers):
    kinds, floor = FLOORS[group]
    share = Share()
    for answer in answers:
        if answer.kind in kinds:
            share.add(answer.is_right)
    assert share.count, f"none of {NUM_ASKED} is of {sorted(kinds)}"
    assert share.value >= floor, evaluate.report([answer for answer in answers if answer.kind in kinds])


def of_all_kinds(count):
    """Items of every kind in turns, as many as asked for."""
    by_kind = defaultdict(list)
    for item in items.test(10 * count):
        if len(by_kind[item.kind]) < math.ceil(count / 4):
            by_kind[item.kind].append(item)
    turns = itertools.zip_longest(*by_kind.values())
    return [item for turn in turns for item in turn if item is not None][:count]


def test_as_transformers_answers():
    """In fp32, where nothing but a difference in what is computed could make one."""
    compared = of_all_kinds(NUM_COMPARED)
    with askers.of_engine(embedded.path(), "float32") as ask:
        ours = evaluate.ask_all(compared, len(compared), ask, askers.CONCURRENCY)
    with askers.of_transformers(embedded.path(), "float32") as ask:
        theirs = evaluate.ask_all(compared, len(compared), ask, 1)
    assert all(is_same(one.got, other.got) for one, other in zip(ours, theirs, strict=True)), evaluate.comparison(
        ours, theirs
    )


def test_it_is_as_large_as_it_says():
    from safetensors import safe_open

    num_parameters = 0
    for shard in embedded.path().glob("*.safetensors"):
        assert shard.stat().st_size <= MAX_SHARD_BYTES
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                stored = tensors.get_slice(name)
                assert stored.get_dtype() == "BF16"
                num_parameters += math.prod(stored.get_shape())
    assert embedded.MODELS["tiny_vl"].abilities.startswith(f"{round(num_parameters / 1e6)}M parameters;")
    assert json.loads((embedded.path() / "config.json").read_text())["model_type"] == "qwen3_vl"
