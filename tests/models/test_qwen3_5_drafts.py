"""Drafts of the multi-token predictor in the engine: the same answers in fewer steps, whatever happens on the way."""

import dataclasses
import functools
import json
import random
import re

import foreseen
import numpy as np
import pytest
import tiny
import tiny_checkpoint
import tiny_qwen3_5
import torch
import transformers
from foreseen import Always, Answers
from hand_batches import Hands
from test_mllama import load_folder
from test_parity import relative
from test_qwen3_5_mtp import draft_all

import tilewright
from tilewright.engine.draft import predictor as read_tokens
from tilewright.engine.draft.drafter import PromptLookupDrafter
from tilewright.engine.draft.policy import DraftPolicy
from tilewright.engine.measure.costs import costs_of
from tilewright.ops.attention import kv_store
from tilewright.types import Constraint, SamplingParams

NAMES = list(foreseen.LAYER_SHARES)
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "drawn": DRAWN}


@pytest.fixture(scope="module")
def load_foreseen(networks, tmp_path_factory):
    """By family and dtype: a model whose drafts are mostly right."""
    folder_of = functools.cache(
        lambda name: foreseen.write(name, *networks(name), tmp_path_factory.mktemp(f"{name}_foreseen"))
    )
    return functools.cache(lambda name, dtype: load_folder(folder_of(name), dtype))


def prompts_for(name, networks, dtype):
    """Of lengths before, at and after the end of a page; with pictures for a model that sees."""
    num_axes = 3 if name in tiny_qwen3_5.SEEING else 1
    prompts = [tiny.text_prompt(length, seed, num_axes) for length, seed in ((5, 1), (150, 2), (64, 3), (63, 4))]
    if num_axes == 3:
        hf, _ = networks(name)
        for media, seed in (([("image", (1, 6, 8))], 5), ([("video", (3, 4, 6)), ("image", (1, 14, 12))], 6)):
            prompts.append(tiny.media_prompt(hf, media, seed))
    return [tiny.in_dtype(prompt.inputs, dtype) for prompt in prompts]


@pytest.fixture(scope="module")
def alone(load_foreseen, networks):
    """The answers to the prompts of a family, each computed by itself, op by op, without drafts."""

    @functools.cache
    def of(name, dtype, how):
        model = load_foreseen(name, dtype)
        found = [
            Answers(model, dtype, replay=False).to([inputs], PARAMS[how])[0]
            for inputs in prompts_for(name, networks, dtype)
        ]
        assert len({tuple(answer) for answer in found}) == len(found)
        return found

    return of


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_answers_are_those_without_drafts_over_keys_in_bytes(kv_cache_dtype, load_foreseen, networks):
    dtype = torch.float32
    model, prompts = load_foreseen(NAMES[0], dtype), prompts_for(NAMES[0], networks, dtype)
    params = next(iter(PARAMS.values()))
    plain, drafted = (Answers(model, dtype, drafts=drafts, kv_cache_dtype=kv_cache_dtype) for drafts in (0, 3))
    assert drafted.to(prompts, params) == plain.to(prompts, params)
    assert drafted.drafter.num_accepted > 0


@pytest.mark.parametrize(("name", "how"), [*((name, "greedy") for name in NAMES), (NAMES[0], "drawn")])
def test_answers_are_those_without_drafts(name, how, dtype, load_foreseen, networks, alone):
    model, prompts, expected = load_foreseen(name, dtype), prompts_for(name, networks, dtype), alone(name, dtype, how)
    ways = {
        "one": {"drafts": 1},
        "four": {"drafts": 4, "num_slots": 96},
        "op by op": {"drafts": 3, "replay": False},
        "pieces of prompts": {"drafts": 3, "tokens_per_step": 272},
        "few slots": {"drafts": 4, "num_slots": 9},
        "found again": {"drafts": 2, "prefix_cache": True},
    }
    if dtype == torch.float32:
        # In bf16 states are rounded where chunks end, so that what was decoded is not the same bits computed as a
        # prompt (docs/models/qwen3_5.md): a sequence that is sent back to wait may go on otherwise, with drafts or not.
        ways["sent back to wait"] = {"drafts": 3, "num_pages": 11, "page_size": 32}
        ways["odd pieces"] = {"drafts": 3, "tokens_per_step": 23}
    for way, options in ways.items():
        answers = Answers(model, dtype, **options)
        assert answers.to(prompts, PARAMS[how]) == expected, way
        if way == "found again":
            assert answers.to(prompts, PARAMS[how]) == expected, way
            assert answers.scheduler.resources.kv.prefix_cache.num_tokens_hit > 0
        assert answers.scheduler.num_preemptions > 0 or way != "sent back to wait"
        assert 0 < answers.drafter.num_accepted < answers.drafter.num_proposed, way
        assert len(answers.core.runner.model_runner._drafts._recorded) > 0 or way == "op by op"


@pytest.mark.parametrize("name", NAMES)
def test_right_drafts_save_steps(name, dtype, load_foreseen, networks):
    answers = Answers(load_foreseen(name, dtype), dtype, drafts=3)
    answers.to(prompts_for(name, networks, dtype)[1:2], GREEDY)
    assert answers.acceptance > 0.7
    assert NUM_TOKENS / answers.num_steps > 2
    assert answers.drafter.lookup.num_proposed == 0


def test_answers_that_end_early_and_join_late(load_foreseen, networks):
    """Stops amid right drafts, n > 1, log-probabilities, prompts that come while others decode, and one that leaves."""
    model = load_foreseen("qwen3_5_text", torch.float32)
    prompts = prompts_for("qwen3_5_text", networks, torch.float32)
    several = dataclasses.replace(DRAWN, n=3, logprobs=2)
    found = []
    for drafts in (0, 3):
        answers = Answers(model, torch.float32, drafts=drafts, prefix_cache=True, tokens_per_step=96)
        whole = answers.to(prompts[:1], GREEDY)[0]
        stopping = dataclasses.replace(GREEDY, stop_token_ids=(whole[7], whole[21]), prompt_logprobs=1)
        sequences = [*answers.add("a", prompts[0], stopping), *answers.add("b", prompts[1], several)]
        leaving = answers.add("c", prompts[2], GREEDY)
        for _ in range(6):
            answers.core.step()
        sequences += answers.add("d", prompts[3], DRAWN)
        answers.core.abort("c")
        answers.run()
        assert leaving[0].finish_reason == "abort"
        assert sequences[0].output_token_ids == whole[:8]
        found.append([(item.output_token_ids, len(item.logprobs), item.finish_reason) for item in sequences])
        assert not drafts or answers.drafter.num_accepted
    assert found[0] == found[1]


def extended(inputs, output_ids):
    """A prompt with an answer behind it, as one prompt."""
    following = np.arange(inputs.next_position, inputs.next_position + len(output_ids), dtype=np.int64)
    positions = np.concatenate(
        [inputs.positions, np.broadcast_to(following, (len(inputs.positions), len(following)))], 1
    )
    stop = inputs.next_position + len(output_ids)
    return dataclasses.replace(
        inputs, token_ids=(*inputs.token_ids, *output_ids), positions=positions, next_position=stop
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    "options", [{}, {"tokens_per_step": 23}, {"replay": False}, {"drafts": 1}, {"prefix_cache": True}], ids=str
)
def test_drafts_are_what_the_predictor_gives_by_hand(options, networks, load_foreseen):
    """Whatever was refused on the way: rows of wrong drafts are left out, keys they left are written again.

    Of a prompt that is found in the prefix cache the keys are found, too.
    """
    model = load_foreseen("qwen3_5_moe", torch.float32)
    inputs = prompts_for("qwen3_5_moe", networks, torch.float32)[-1]
    answers = Answers(model, torch.float32, **{"drafts": 3, **options})
    answers.core.runner.model_runner.kv_caches[-1].data.fill_(float("nan"))  # all that is read was written
    if "prefix_cache" in options:
        answers.to([inputs], DRAWN)
    logits_of_passes = spy_on_passes(answers.core.runner.model_runner._drafts)
    (sequence,) = answers.add("a", inputs, DRAWN)
    seen = {}  # by the number of tokens known
    while answers.core.has_work:
        logits_of_passes.clear()
        answers.core.step()
        if sequence.output_token_ids and logits_of_passes:
            seen[sequence.num_tokens] = torch.cat(logits_of_passes)
            assert answers.drafter._drafted[sequence].token_ids == seen[sequence.num_tokens].argmax(1).tolist()
    assert 0 < answers.drafter.num_accepted < answers.drafter.num_proposed
    assert bool(sequence.num_cached_tokens) == ("prefix_cache" in options)
    whole = extended(inputs, sequence.output_token_ids)
    logits, _ = draft_all(model, tiny.Prompt(whole), 0, 1000)
    assert relative(torch.stack([rows[0] for rows in seen.values()]), logits[[count - 2 for count in seen]]) < 1e-3
    for num_tokens in list(seen)[1:-1:4]:
        wanted = by_hand(model, whole, num_tokens, len(seen[num_tokens]))
        assert relative(seen[num_tokens], wanted) < 1e-3


def spy_on_passes(drafts):
    """A list that the logits of each pass of the predictor are put into, where there are any."""
    found, run = [], drafts._run

    def keep(*arguments):
        logits, states = run(*arguments)
        if len(logits):
            found.append(logits.clone())
        return logits, states

    drafts._run = keep
    return found


def plans_of(drafter, monkeypatch):
    """The drafter's plans from now on, one for each step with chunks."""
    plans, plan = [], drafter.plan
    monkeypatch.setattr(drafter, "plan", lambda step: plans.append(plan(step)) or plans[-1])
    return plans


def by_hand(model, inputs, num_tokens, num_drafts):
    """The logits of drafts after so many tokens of a prompt, all of it computed anew in one piece."""
    hands = Hands(model)
    going = hands.start(inputs)
    batch = hands.batch([(going, num_tokens - 1)])
    _, hidden = model.forward_with_hidden(batch)
    following = torch.tensor(inputs.token_ids[1:num_tokens])
    media = [
        dataclasses.replace(run, rows_M=run.rows_M - 1) for run in hands.batch([(going, going.num_left)]).feature_runs
    ]
    logits, states = model.draft(following, hidden, batch, media)
    found = [logits[-1:]]
    going.num_done = num_tokens - 1
    while len(found) < num_drafts:
        logits, states = model.draft(found[-1].argmax(1), states[-1:], hands.batch([(going, 1)]))
        found.append(logits)
        going.num_done += 1
    return torch.cat(found)


def test_prompts_alone_are_read_while_drafting_pauses(load_foreseen, networks, monkeypatch):
    """And the text itself is looked up instead."""
    model = load_foreseen("qwen3_5_text", torch.float32)
    inputs = prompts_for("qwen3_5_text", networks, torch.float32)[0]
    (answer,) = Answers(model, torch.float32).to([inputs], GREEDY)
    inputs = extended(inputs, [*answer, *inputs.token_ids])
    paused, expected = Answers(model, torch.float32, drafts=3), Answers(model, torch.float32).to([inputs], GREEDY)
    paused.drafter.policy = Always(None)
    draft_inputs, draft = [], paused.core.runner.draft
    plans = plans_of(paused.drafter, monkeypatch)
    monkeypatch.setattr(paused.core.runner, "draft", lambda items: draft_inputs.extend(items) or draft(items))
    assert paused.to([inputs], GREEDY) == expected
    assert sum(item.num_tokens for item in draft_inputs) == len(inputs.token_ids)
    assert not any(item.num_drafts for item in draft_inputs) and not plans[-1].keeps_hidden
    assert paused.drafter.num_proposed == paused.drafter.lookup.num_proposed > 0
    # Off and on again in the middle: a few tokens that nobody read have no keys, which is nobody's answer.
    changing = Answers(model, torch.float32, drafts=3)
    (sequence,) = changing.add("a", inputs, GREEDY)
    for number in range(1000):
        changing.drafter.policy = Always((3, 0, None)[number // 4 % 3])
        if not changing.core.has_work:
            break
        changing.core.step()
    assert [sequence.output_token_ids] == expected
    assert changing.drafter._num_accepted > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_cache": True}, {"prefix_cache": True, "num_pages": 11}, {"num_pages": 11}, {"tokens_per_step": 23}],
    ids=str,
)
def test_drafts_are_made_over_keys_that_were_read(options, load_foreseen, networks, alone, monkeypatch):
    """Through pauses at random, pages found again and sequences sent back to wait; here not one token may be missed.

    A token's key is NaN from the step that computes it, or only drafts it, until it is read. Answers stay the same.
    """
    monkeypatch.setattr(read_tokens, "MAX_MISSED_TOKENS", 0)
    model = load_foreseen("qwen3_5_text", torch.float32)
    prompts, expected = (
        prompts_for("qwen3_5_text", networks, torch.float32),
        alone("qwen3_5_text", torch.float32, "drawn"),
    )
    answers = Answers(model, torch.float32, drafts=3, page_size=32, **options)
    unread_until_read(answers.core.runner)
    plans = plans_of(answers.drafter, monkeypatch)
    logits_of_passes = spy_on_passes(answers.core.runner.model_runner._drafts)
    chance, num_left_alone = random.Random(5), 0
    for _ in range(4):
        sequences = [answers.add(str(number), inputs, DRAWN)[0] for number, inputs in enumerate(prompts)]
        while answers.core.has_work:
            if chance.random() < 0.1:
                answers.drafter.policy = Always(chance.choice((None, 0, 1, 3)))
            answers.core.step()
            if answers.drafter.policy.num_drafts is not None:
                num_left_alone += plans[-1].is_read.count(False)
        assert [sequence.output_token_ids for sequence in sequences] == expected
    assert len(logits_of_passes) > 20 and num_left_alone > 20
    assert all(bool(logits.isfinite().all()) for logits in logits_of_passes)
    assert bool(answers.scheduler.num_preemptions) == ("num_pages" in options)


def unread_until_read(runner):
    """Lets each step make the predictor's keys and values of its rows NaN."""
    cache, run = runner.model_runner.kv_caches[-1], runner.run
    cache.data.fill_(float("nan"))

    def run_and_spoil(step):
        slots = [
            chunk.sequence.pages[place // cache.page_size] * cache.page_size + place % cache.page_size
            for chunk in step.chunks
            for place in range(chunk.start, chunk.stop)
        ]
        nothing = torch.full((len(slots), cache.data.shape[1], cache.head_width), float("nan"))
        kv_store(nothing, nothing, cache, torch.tensor(slots))
        return run(step)

    runner.run = run_and_spoil


def test_a_model_whose_drafts_are_wrong_stops_drafting(models_with_wrong_drafts, networks):
    """With the real policy and a clock that says what real ones do: a pass takes a third of a step."""
    model = models_with_wrong_drafts
    prompts = prompts_for("qwen3_5_text", networks, torch.float32)
    params = dataclasses.replace(GREEDY, max_tokens=300)
    answers = Answers(model, torch.float32, drafts=4)
    answers.drafter.policy = DraftPolicy(4, 32, 12)
    answers.drafter.lookup = PromptLookupDrafter(1)
    answers.drafter.lookup.propose = lambda sequence, max_drafts: []
    answers.drafter.clock = Clock(answers.core.runner)
    assert answers.to(prompts[:1], params) == Answers(model, torch.float32).to(prompts[:1], params)
    # Three steps to time, a trial of four, and two more after 64 and 128 steps.
    assert answers.drafter._num_proposed < 25
    assert answers.num_steps > 280


class Clock:
    """Says that a step has taken 10 ms, and 1 more for each row; each pass of the predictor 3."""

    def __init__(self, runner):
        self.now_s = 0.0
        drafts = runner.model_runner._drafts
        run, run_pass = runner.run, drafts._run

        def timed_run(step):
            self.now_s += 0.010 + 0.001 * step.num_tokens
            return run(step)

        def timed_pass(*arguments):
            self.now_s += 0.003
            return run_pass(*arguments)

        runner.run, drafts._run = timed_run, timed_pass

    def __call__(self):
        return self.now_s


@pytest.fixture(scope="module")
def models_with_wrong_drafts(networks, tmp_path_factory):
    torch.manual_seed(11)
    hf, source = networks("qwen3_5_text")
    twin = foreseen.Twin(hf.model)
    extra = {f"mtp.{key}": tensor.clone() for key, tensor in twin.state_dict().items()}
    folder = foreseen.save_tensors(tmp_path_factory.mktemp("wrong"), source, lambda tensors: tensors | extra)
    return load_folder(folder)


def test_a_model_whose_drafts_are_right_goes_on_drafting(load_foreseen, networks):
    model = load_foreseen("qwen3_5_text", torch.float32)
    prompts = prompts_for("qwen3_5_text", networks, torch.float32)
    params = dataclasses.replace(GREEDY, max_tokens=200)
    answers = Answers(model, torch.float32, drafts=4)
    answers.drafter.policy = DraftPolicy(4, 32, 12)
    answers.drafter.clock = Clock(answers.core.runner)
    assert answers.to(prompts[:1], params) == Answers(model, torch.float32).to(prompts[:1], params)
    assert answers.num_steps < 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole checkpoint, with a tokenizer of bytes."""
    torch.manual_seed(3)
    sizes = {**tiny_qwen3_5.TEXT, **tiny_qwen3_5.DENSE, "vocab_size": tiny_checkpoint.VOCAB}
    config = transformers.Qwen3_5TextConfig(**sizes, rope_parameters=tiny_qwen3_5.ROPE)
    network = transformers.Qwen3_5ForCausalLM(config)
    source = tiny.save(network, tmp_path_factory.mktemp("source"))
    made = foreseen.write("qwen3_5_text", network, source, tmp_path_factory.mktemp("whole"))
    tiny_checkpoint.write_tokenizer(made)
    return made


def open_engine(folder, **options):
    return tilewright.Engine(folder, dtype="float32", kv_memory="40MB", max_context=512, pack_cache=False, **options)


def ask(engine):
    schema = {"type": "object", "properties": {"kind": {"enum": ["book", "film"]}, "title": {"type": "string"}}}
    document = Constraint("json_schema", json.dumps({**schema, "required": ["kind"], "additionalProperties": False}))
    handles = [
        engine.submit_prompt(text="a", constraint=document, max_tokens=60),
        engine.submit_prompt(text="b", constraint=Constraint("regex", "[a-z]{30}"), temperature=1.0, seed=3, n=2),
        engine.submit_prompt(text="a longer one", max_tokens=60, ignore_eos=True, stop=["~~~"], logprobs=1),
    ]
    return [completion for handle in handles for completion in handle.result(60)]


def test_the_engine_drafts_by_itself_and_holds_to_grammars(folder):
    with open_engine(folder, speculate=0) as engine:
        assert engine.loaded.model.predictor is None and engine.loop.core.drafter is None
        assert all(name.startswith("mtp.") for name in engine.loaded.report.ignored)
        num_layers = engine.loaded.model.kv_spec.num_layers
        expected = [completion.token_ids for completion in ask(engine)]
        assert engine.stats().num_drafts_proposed == 0
    with open_engine(folder) as engine:
        assert engine.loaded.model.kv_spec.num_layers == num_layers + 1
        assert isinstance(engine.loop.core.drafter.policy, DraftPolicy)
        assert [completion.token_ids for completion in ask(engine)] == expected
    with open_engine(folder, speculate=2) as engine:
        engine.loop.core.drafter.policy = Always(2)
        completions = ask(engine)
        assert [completion.token_ids for completion in completions] == expected
        assert re.fullmatch("[a-z]{30}", completions[1].text)
        stats = engine.stats()
        assert 0 < stats.num_drafts_accepted < stats.num_drafts_proposed
        assert engine.loop.core.drafter._num_accepted > 0


def test_what_drafting_costs(folder, load_foreseen):
    model = load_foreseen("qwen3_5_moe", torch.bfloat16)
    costs, num_layers = costs_of(model, 2), len(model.decoder.kv_layers)
    per_layer = model.kv_spec.bytes_per_token(2) // model.kv_spec.num_layers
    assert costs.kv_bytes_per_token == num_layers * per_layer and costs.draft.kv_bytes_per_token == per_layer
    layer = model.mtp.layer
    experts = (layer.mlp.experts.gate_up.value.data[0].nbytes + layer.mlp.experts.down.value.data[0].nbytes) * 3
    assert costs.draft.expert_bytes_per_draft == experts
    assert costs.draft.read(2, 1, 3, 100) == (
        2 * costs.draft.weight_bytes + model.decoder.head.packed.data.nbytes + 3 * experts + 100 * per_layer
    )
    assert costs.draft.flops_per_token >= 2 * model.width * 2 * model.width
    with open_engine(folder, speculate=3) as engine:
        engine.loop.core.drafter.policy = Always(3)
        engine.generate("a", max_tokens=20)
        with_drafts = engine.loop._counter.reads.num_bytes / engine.stats().num_steps
    with open_engine(folder, speculate=0) as engine:
        engine.generate("a", max_tokens=20)
        assert with_drafts > engine.loop._counter.reads.num_bytes / engine.stats().num_steps
