"""A tiny Llama-3.2-Vision in `tilewright.Engine`: what is looked at is computed once, kept, shared and given back."""

import threading

import pytest
import tiny_checkpoint
from asking import about, picture

import tilewright
from tilewright.engine.handle import EngineError
from tilewright.engine.measure.costs import costs_of
from tilewright.engine.schedule.sequence import Sequence
from tilewright.models.mllama.processor import MllamaProcessor
from tilewright.types import Constraint, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.write_cross_model(tmp_path_factory.mktemp("mllama"))


@pytest.fixture
def engine(folder):
    with tilewright.Engine(folder, dtype="float32", kv_memory="20MB", max_context=512, pack_cache=False) as engine:
        yield engine


@pytest.fixture
def encoded(engine, monkeypatch):
    """The pictures the tower has seen, as they come."""
    items = []
    encode = engine.loaded.model.encode

    def counting(batch):
        items.extend(batch.items)
        return encode(batch)

    monkeypatch.setattr(engine.loaded.model, "encode", counting)
    return items


def test_a_picture_changes_the_answer(engine):
    answers = {engine.chat(about(picture(seed), "What?"), max_tokens=12).token_ids for seed in range(4)}
    assert len(answers) > 1
    assert engine.chat(about("What?"), max_tokens=12).token_ids not in answers


def test_a_second_question_encodes_nothing(engine, encoded):
    one = picture(1)
    engine.chat(about(one, "What is it?"), max_tokens=4)
    assert len(encoded) == 1
    asked = about(one, "What colour does it have?")
    answer = engine.chat(asked, max_tokens=8)
    follow_up = [*asked, {"role": "assistant", "content": answer.text}, *about("And why?")]
    engine.chat(follow_up, max_tokens=8)
    engine.chat(about("Another beginning: ", one), max_tokens=4)
    assert len(encoded) == 1
    assert engine.stats().cross_hit_rate == 0.75
    engine.chat(about(one, picture(2), "Both?"), max_tokens=4)  # the first one's features are still there
    assert len(encoded) == 2


def test_what_is_kept_of_a_picture_spares_reading_it(engine, encoded, monkeypatch):
    one, read = picture(1), []
    canvas = MllamaProcessor._canvas
    monkeypatch.setattr(MllamaProcessor, "_canvas", lambda *given: read.append(given) or canvas(*given))
    first = engine.chat(about(one, "What is it?"), max_tokens=8).token_ids
    scheduler = engine.loop.core.scheduler
    scheduler.resources.media.features.clear()  # evicted, while the keys and values made of them are still there
    assert engine.chat(about(one, "What is it?"), max_tokens=8).token_ids == first
    assert len(read) == len(encoded) == 1
    scheduler.resources.media.features.clear()
    scheduler.resources.media.cross_cache.clear()
    assert engine.chat(about(one, "What is it?"), max_tokens=8).token_ids == first
    assert len(read) == len(encoded) == 2


def test_steps_that_look_at_a_picture_read_more(engine, monkeypatch):
    """The bytes of an answer's last step, in which one token is computed: with a picture, with two, and without."""
    counter, steps = engine.loop._counter, []
    count = counter.count
    monkeypatch.setattr(counter, "count", lambda step: (steps.append(step), count(step)))
    model, num_tokens, last = engine.loaded.model, [], []
    costs = costs_of(model, 4)
    for parts in (["What?"], [picture(1), "What?"], [picture(1), picture(2), "What?"], [picture(1), "x", picture(2)]):
        answer = engine.chat(about(*parts), max_tokens=2, ignore_eos=True)
        num_tokens.append(answer.num_prompt_tokens + 1)
        last.append(steps[-1])
    seen = [0, 34, 68, 34]  # two tiles of 17 a picture; the last one's alone where text is between
    wanted = [costs.decode_bytes(tokens, states) for tokens, states in zip(num_tokens, seen, strict=True)]
    assert [step.read_bytes for step in last] == wanted
    assert last[1].flops - last[0].flops > costs.cross_linear_flops_per_token


def test_pictures_and_text_at_once(engine):
    prompts = [about(picture(1), "a"), about("b"), about(picture(2, 60, 10), picture(3), "c"), about("d", picture(1))]
    alone = [engine.chat(prompt, max_tokens=10).token_ids for prompt in prompts]
    engine.loop.core.resources.media.cross_cache.clear()
    engine.loop.core.resources.kv.pool.clear()
    together = engine.chat(prompts, max_tokens=10)
    assert [answer.token_ids for answer in together] == alone
    several = engine.chat(prompts[0], max_tokens=10, n=3)
    assert {answer.token_ids for answer in several} == {alone[0]}


def test_what_is_looked_at_is_held_while_it_runs(engine):
    stats = engine.stats()
    assert stats.num_cross_pages > 0 and stats.num_cross_pages_used == 0
    stream = engine.stream(about(picture(1), "go on"), max_tokens=300, ignore_eos=True)
    next(stream)
    assert engine.stats().num_cross_pages_used == 1  # two tiles of 17 states
    stream.close()
    engine.chat(about("wait"), max_tokens=1)
    assert engine.stats().num_cross_pages_used == 0


def test_a_picture_that_cannot_be_encoded_hurts_no_other(engine, monkeypatch):
    expected = engine.chat(about(picture(5), "good"), max_tokens=8).token_ids
    engine.loop.core.resources.media.cross_cache.clear()
    engine.loop.core.resources.media.features.clear()
    engine.loop.core.resources.kv.pool.clear()
    encode = engine.loaded.model.encode
    failures = iter([True])

    def failing(batch):
        if next(failures, False):
            raise RuntimeError("the tower fell over")
        return encode(batch)

    monkeypatch.setattr(engine.loaded.model, "encode", failing)
    with pytest.raises(EngineError, match="fell over"):
        engine.chat(about(picture(6), "bad"), max_tokens=8)
    cross_cache, features = (
        engine.loop.core.resources.media.cross_cache,
        engine.loop.core.resources.media.features,
    )
    assert not cross_cache._pins and not features._pins and len(cross_cache._free) == cross_cache.num_pages
    assert engine.chat(about(picture(5), "good"), max_tokens=8).token_ids == expected


def test_too_little_memory_for_many_is_waited_for(folder):
    """Pages for one picture of four tiles, and eight requests with one each."""
    with tilewright.Engine(folder, dtype="float32", kv_memory="700KB", max_context=256, pack_cache=False) as engine:
        assert engine.stats().num_cross_pages == 2
        pictures = [picture(seed, 32, 32) for seed in range(8)]
        alone = [engine.chat(about(one, "x"), max_tokens=6).token_ids for one in pictures]
        engine.loop.core.resources.kv.pool.clear()
        answers: dict[int, tuple[int, ...]] = {}

        def ask(index):
            answers[index] = engine.chat(about(pictures[index], "x"), max_tokens=6).token_ids

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[index] for index in range(8)] == alone
        with pytest.raises(RequestError, match="3 images side by side are 204 encoder states, expected at most 128"):
            engine.chat(about(*pictures[:3], "x"), max_tokens=6)
        apart = [part for one in pictures[:3] for part in (one, "and")]
        assert engine.chat(about(*apart), max_tokens=6).finish_reason == "length"


def test_one_answer_at_a_time_may_see_many_pictures(folder):
    """However few answers there are at once: memory alone bounds how many pictures one of them sees."""
    options = {"max_sequences": 1, "kv_memory": "20MB", "max_context": 256, "pack_cache": False}
    with tilewright.Engine(folder, dtype="float32", **options) as engine:
        answer = engine.chat(about(*(picture(seed, 32, 32) for seed in range(5)), "x"), max_tokens=3)
        assert answer.finish_reason == "length"


def test_too_little_memory_for_one(folder):
    with pytest.raises(RequestError, match="the encoder states of one image"):
        tilewright.Engine(folder, dtype="float32", kv_memory="50KB", pack_cache=False)


def test_a_picture_is_no_draft(engine):
    """The answer repeats what stands before the picture, so that its token comes next: one that is never written."""
    (letter,) = engine.loaded.tokenizer.encode("A")
    options = {"images": [picture(1)], "max_tokens": 8, "logit_bias": {letter: 100.0}}
    for constraint in (None, Constraint("regex", "A+")):
        assert engine.generate("AA<|image|>x", constraint=constraint, **options).text == "A" * 8
    inputs = engine.loaded.processor.prompt("78<|image|>6", media=[{"type": "image", "image": picture(1)}])
    (sequence,) = Sequence.for_request("x", inputs, GREEDY)
    sequence.token_ids += engine.loaded.tokenizer.encode("9678")
    drafter = engine.loop.core.scheduler.drafter
    assert drafter.propose(sequence, 4) == []
    sequence.token_ids += engine.loaded.tokenizer.encode("967")
    assert drafter.propose(sequence, 4) == engine.loaded.tokenizer.encode("8967")


def test_prompts_of_tokens(engine):
    ids = engine.loaded.tokenizer.encode("<|image|><|begin_of_text|>hello")
    one = engine.generate(
        prompt_token_ids=ids, images=[picture(1)], max_tokens=5, prompt_logprobs=1, repetition_penalty=1.2
    )
    two = engine.generate("<|image|>hello", images=[picture(1)], max_tokens=5, repetition_penalty=1.2)
    assert one.token_ids == two.token_ids and len(one.prompt_logprobs) == len(ids)
    with pytest.raises(RequestError, match="the prompt has token 268, expected 0 to 267"):
        engine.generate(prompt_token_ids=[268], max_tokens=1)
    with pytest.raises(RequestError, match="logit_bias has token 260, expected 0 to 259"):
        engine.generate("x", logit_bias={260: 1.0}, max_tokens=1)
    with pytest.raises(RequestError, match="video 1"):
        engine.generate("x", videos=[b"clip"], max_tokens=1)
