"""A tiny Qwen3.5 in `tilewright.Engine`: states that are shared, kept, gone back to and given back."""

import threading

import numpy as np
import pytest
import tiny_checkpoint
from asking import about, picture
from clips import write_clip

import tilewright
from tilewright.engine.measure.costs import costs_of
from tilewright.types import Constraint, RequestError
from tilewright.weights.checkpoint import open_checkpoint

OPTIONS = {"dtype": "float32", "max_context": 1024, "pack_cache": False}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = "The whale swims through the sea, and nobody knows where to. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.write_hybrid_model(tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def engine(folder):
    with tilewright.Engine(folder, kv_memory="20MB", **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(folder):
    """Answers one by one, nothing found of others, guessed or recorded."""
    plain = {"prefix_cache": False, "speculate": 0, "replay": False, "max_sequences": 1}
    with tilewright.Engine(folder, kv_memory="20MB", **plain, **OPTIONS) as engine:
        yield engine


def said(text, *parts):
    return [{"role": "assistant", "content": text}, *about(*parts)]


def test_the_next_turn_goes_on_from_a_state(engine, alone):
    turns = about(LONG, picture(1, 40, 56), "What?")
    cached = []
    for question in ("And why?", "Since when? " * 6, "So?"):
        answer = engine.chat(turns, max_tokens=70, **GREEDY)
        assert answer.token_ids == alone.chat(turns, max_tokens=70, **GREEDY).token_ids
        cached.append(answer.num_cached_tokens)
        turns = [*turns, *said(answer.text, question)]
    assert cached[0] == 0 and 128 <= cached[1] <= cached[2] and cached[2] % 64 == 0
    assert engine.stats().state_hit_rate > 0


def test_prompts_that_begin_alike_share_a_state(engine, alone):
    system = [{"role": "system", "content": "Answer as a sailor would, in few words. " * 8}]
    asked = [[*system, *about(f"{number}. " * 40)] for number in range(4)]
    answers = [engine.chat(one, max_tokens=6, **GREEDY) for one in asked]
    assert [a.token_ids for a in answers] == [alone.chat(one, max_tokens=6, **GREEDY).token_ids for one in asked]
    # The second comes past the end of what both have, and leaves its state there.
    assert [a.num_cached_tokens > 0 for a in answers] == [False, False, True, True]


def test_a_video_and_pictures_are_seen(engine, alone, tmp_path):
    clip = write_clip(tmp_path / "clip.mp4", 30)
    asked = [{"role": "user", "content": [{"type": "video", "video": clip}, {"type": "text", "text": "What?"}]}]
    answer = engine.chat(asked, max_tokens=12, **GREEDY)
    assert answer.token_ids == alone.chat(asked, max_tokens=12, **GREEDY).token_ids
    seen = {engine.chat(about(picture(seed, 40, 56), "What?"), max_tokens=12, **GREEDY).token_ids for seed in range(3)}
    assert len({*seen, answer.token_ids, engine.chat(about("What?"), max_tokens=12, **GREEDY).token_ids}) > 3


def test_log_probabilities_of_a_prompt(engine, alone):
    """Also of one whose state is kept: all rows are computed again."""
    asked = {"prompt": LONG, "max_tokens": 3, "prompt_logprobs": 1, **GREEDY}
    expected = alone.generate(**asked).prompt_logprobs
    for _ in range(2):
        given = engine.generate(**asked).prompt_logprobs
        assert len(given) == len(LONG) and given[0] is None
        assert [one.token_id for one in given[1:]] == [one.token_id for one in expected[1:]]
        assert np.allclose([one.logprob for one in given[1:]], [one.logprob for one in expected[1:]], atol=1e-3)


def test_constrained_answers(engine, alone):
    """What a grammar forces is computed as drafts, which keep a state each."""
    schema = Constraint("json_schema", '{"const": {"whale": "a very large animal", "swims": true}}')
    choice = Constraint("regex", "(whale|shark|herring){2,9}")
    for constraint in (schema, choice):
        asked = {"max_tokens": 120, "temperature": 0.0, "constraint": constraint, "enable_thinking": False}
        answer = engine.chat(about("Which?"), **asked)
        assert answer.token_ids == alone.chat(about("Which?"), **asked).token_ids
    assert answer.text.startswith(("whale", "shark", "herring"))


def test_an_answer_that_is_left_gives_its_slots_back(engine):
    for count in (0, 1, 5):
        stream = engine.stream(about(LONG, f"{count}"), max_tokens=600, **GREEDY)
        for _ in range(count):
            next(stream)
        stream.close()
    engine.chat(about("wait"), max_tokens=1)
    stats = engine.stats()
    assert stats.num_running == stats.num_state_slots_used == stats.num_pages_used == 0


def test_too_little_memory_for_all_at_once(folder, alone):
    """Slots for three that run, pages for less than two answers: the others wait, and some are sent back."""
    asked = [about(LONG[:60], f"{number}?") for number in range(6)]
    expected = [alone.chat(one, max_tokens=150, **GREEDY).token_ids for one in asked]
    with tilewright.Engine(folder, kv_memory="1300KB", max_tokens_per_step=64, **OPTIONS) as engine:
        answers: dict[int, tuple[int, ...]] = {}

        def ask(number):
            answers[number] = engine.chat(asked[number], max_tokens=150, **GREEDY).token_ids

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.stats().num_preemptions > 0
    assert [answers[number] for number in range(6)] == expected


def test_too_little_memory_for_one(folder):
    with pytest.raises(
        RequestError, match="the recurrent state of one sequence takes 24192, a page of keys and values"
    ):
        tilewright.Engine(folder, kv_memory="20KB", **OPTIONS)


def test_what_a_token_costs(folder, engine):
    """Counted from the tensors of the checkpoint: all matrices of the text model, the table once, as head."""
    shapes = open_checkpoint(folder).shapes
    text = {name: shape for name, shape in shapes.items() if "language_model" in name and len(shape) == 2}
    costs = costs_of(engine.loaded.model, 4)
    table = text.pop("model.language_model.embed_tokens.weight")
    assert costs.head_flops == 2 * table[0] * table[1]
    assert costs.linear_flops_per_token == 2 * sum(rows * columns for rows, columns in text.values())
    # Three recurrent layers: 3 inputs of 160 channels, and 4 heads of 16 x 24; two others: 2 heads of keys and values.
    assert costs.state_bytes_per_sequence == 3 * 4 * (3 * 160 + 4 * 16 * 24)
    assert costs.kv_bytes_per_token == 2 * 2 * (32 + 32) * 4
    assert costs.decode_bytes(100) - costs.decode_bytes(99) == costs.kv_bytes_per_token
