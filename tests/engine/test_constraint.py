"""Whatever the model prefers, a constrained answer fits its constraint, and is the same in any company."""

import ast
import json
import re
import threading
import weakref
from functools import cache

import hypothesis.strategies as st
import jsonschema_rs
import numpy as np
import pytest
import tokenizers
import torch
from checkpoint_files import llama_metadata, smollm2_metadata
from constrained_model import (
    BYTES_END,
    BYTES_SIZE,
    QWEN_SIZE,
    add,
    byte_tokenizer,
    constrained_core,
    prompt,
    qwen_tokenizer,
    run_all,
)
from fuzzing import num_cases
from hypothesis import given, settings
from tokenizers import decoders, models

from tilewright.engine.constraint import compiler as constraint_module
from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.engine.constraint.sandbox import CompileSandbox
from tilewright.engine.loop import EngineLoop
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import Constraint, RequestError, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name_of_the_person", "age", "tags"],
    "additionalProperties": False,
}
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: factor ("*" factor)*
factor: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


PAIR = {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def json_constraint(schema, allows_reasoning=False):
    return Constraint("json_schema", json.dumps(schema), allows_reasoning)


def answers(core, inputs, params, name="a"):
    sequences = add(core, name, inputs, params)
    run_all(core)
    return [core.completion(sequence) for sequence in sequences]


def byte_answers(constraint, *, core=None, inputs=None, **params):
    """The answers of a model of random logits over single bytes."""
    core = core or constrained_core(byte_tokenizer(), BYTES_SIZE)
    params = {"max_tokens": 2000, "seed": 0, **params}
    return answers(core, inputs or prompt(byte_tokenizer()), SamplingParams(constraint=constraint, **params))


leaves = st.one_of(
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-150, 150),
        st.integers(0, 500),
    ),
    st.just({"type": "number", "minimum": -2.5, "maximum": 100}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "é"]}}]),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.text(max_size=4) | st.integers(-9, 99), min_size=1, max_size=5)
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]+$", "maxLength": 12},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "ipv4"},
            {"$ref": "#/$defs/pair"},
        ]
    ),
)


def objects(values):
    properties = st.dictionaries(st.text('abxyz_é"\\ ', min_size=1, max_size=6), values, max_size=4)
    return st.builds(
        lambda fields, required: {
            "type": "object",
            "properties": fields,
            "required": [name for name, is_required in zip(fields, required, strict=False) if is_required],
            "additionalProperties": False,
        },
        properties,
        st.lists(st.booleans(), min_size=4, max_size=4),
    )


def arrays(values):
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        values,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def unions(values):
    return st.builds(lambda choices: {"anyOf": choices}, st.lists(values, min_size=1, max_size=3))


schemas = st.recursive(
    leaves,
    lambda values: objects(values) | arrays(values) | unions(values),
    max_leaves=8,
).map(lambda schema: {"$defs": {"pair": PAIR}, **schema})


@settings(max_examples=num_cases(60), deadline=None)
@given(schemas, st.integers(0, 3), st.sampled_from([0.0, 1.0]), st.sampled_from([0, 4]))
def test_documents_fit_their_schema(schema, seed, temperature, num_drafts):
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, num_drafts=num_drafts, favour='"}],')
    (completion,) = byte_answers(json_constraint(schema), core=core, seed=seed, temperature=temperature)
    assert completion.finish_reason == "stop", completion.text
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(completion.text)), completion.text


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{3,5}@(example|test)\.(org|com)",
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
        r"(yes|no|yesterday)",
        r"^a+b*c?$",
        r"[^a-z\n]{1,10}",
        r"(é|日本|ü)+x",
        r'\{"a": ("[^"\\\n]{0,9}"|null)\}',
    ],
)
def test_a_regular_expression_is_matched_in_full(pattern):
    for completion in byte_answers(Constraint("regex", pattern), n=4):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text, re.ASCII), completion.text


def test_a_grammar():
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, favour="19")
    texts = [item.text for item in byte_answers(Constraint("lark", ARITHMETIC), core=core, n=6)]
    assert len(set(texts)) > 1 and any(not text.isdigit() for text in texts)
    for text in texts:
        ast.parse(text, mode="eval")
        assert re.fullmatch(r"[0-9()*+-]+", text)


GOOD = json_constraint(PERSON)
REQUESTS = {
    "person": {"constraint": GOOD, "temperature": 0.0},
    "free": {"max_tokens": 30, "seed": 5, "ignore_eos": True},
    "expression": {"constraint": Constraint("lark", ARITHMETIC), "seed": 1, "top_p": 0.9, "logprobs": 2},
    "greedy": {"max_tokens": 25, "temperature": 0.0, "ignore_eos": True},
    "people": {"constraint": GOOD, "seed": 7, "n": 3, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "thinker": {"constraint": json_constraint(PERSON, True), "seed": 2, "prompt_logprobs": 1},
}


def params_of(name):
    return SamplingParams(**{"max_tokens": 400, **REQUESTS[name]})


@cache
def alone(name):
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, max_rows_with_drafts=1)
    return [item.token_ids for item in answers(core, prompt(byte_tokenizer(), f"Who is {name}?"), params_of(name))]


@st.composite
def cores(draw):
    page_size = draw(st.sampled_from([4, 16]))
    max_sequences = draw(st.integers(1, 8))
    return {
        "page_size": page_size,
        "num_pages": draw(st.sampled_from([440, 520, 2000])) // page_size,
        "num_drafts": draw(st.sampled_from([0, 1, 4])),
        "max_sequences": max_sequences,
        "max_tokens_per_step": max_sequences + draw(st.sampled_from([0, 6, 100])),
        "max_rows_with_drafts": draw(st.sampled_from([1, 4, 32])),
    }


@settings(max_examples=num_cases(25), deadline=None)
@given(cores(), st.lists(st.tuples(st.sampled_from(list(REQUESTS)), st.integers(0, 40)), min_size=2, max_size=6))
def test_answers_are_the_same_alone_and_together(options, arrivals):
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, **options)
    sequences = []
    for number in range(5000):
        for index, (name, arrival) in enumerate(arrivals):
            if arrival == number:
                inputs = prompt(byte_tokenizer(), f"Who is {name}?")
                sequences.append((name, add(core, str(index), inputs, params_of(name))))
        if len(sequences) == len(arrivals) and not core.has_work:
            break
        assert not core.step().failures
    for name, found in sequences:
        assert [tuple(sequence.output_token_ids) for sequence in found] == alone(name), name
    assert core.resources.kv.pool.num_used == 0


def test_preempted_answers_go_on_where_they_were():
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, num_pages=27, num_drafts=4)
    names = ["people", "thinker", "person", "people", "expression"]
    found = [
        add(core, str(index), prompt(byte_tokenizer(), f"Who is {name}?"), params_of(name))
        for index, name in enumerate(names)
    ]
    run_all(core)
    assert core.scheduler.num_preemptions > 0
    for name, sequences in zip(names, found, strict=True):
        assert [tuple(sequence.output_token_ids) for sequence in sequences] == alone(name), name


def test_alone_they_fit():
    fits = jsonschema_rs.validator_for(PERSON).is_valid
    for name in ("person", "people"):
        for token_ids in alone(name):
            assert fits(json.loads(byte_tokenizer().decode(token_ids)))


def test_what_is_forced_takes_one_step():
    with_forced, without = (
        constrained_core(byte_tokenizer(), BYTES_SIZE, **more) for more in ({}, {"max_rows_with_drafts": 1})
    )
    (first,), (second,) = (byte_answers(GOOD, core=core, temperature=0.0) for core in (with_forced, without))
    assert first.token_ids == second.token_ids
    assert len(without.runner.steps) == len(second.token_ids)
    # The name of the person and of the age, and more, are letters that nothing else may come instead of.
    assert len(with_forced.runner.steps) <= len(without.runner.steps) - len("name_of_the_perso" + "age")


def test_drafts_that_do_not_fit_are_cut():
    """The text before says 1, 2, 3, a, and so would a draft after 1, 2, 3; but the grammar has numbers alone."""
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, num_drafts=4, favour="123,a", scale=0.0)
    inputs = prompt(byte_tokenizer(), "1,2,3,a,b,1,2,3,a,b,1,2,3,")
    (sequence,) = add(
        core, "a", inputs, SamplingParams(constraint=Constraint("regex", r"[1-3](,[1-3]){9}"), temperature=0.0)
    )
    drafts = []
    run = core.runner.run
    core.runner.run = lambda step: (drafts.extend(list(chunk.draft_token_ids) for chunk in step.chunks), run(step))[1]
    run_all(core)
    assert any(drafts) and not any(token_id in byte_tokenizer().encode("ab") for draft in drafts for token_id in draft)
    assert re.fullmatch(r"[1-3](,[1-3]){9}", core.completion(sequence).text)


def test_the_mask_wins_over_biases():
    (a, b, c) = byte_tokenizer().encode("abc")
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, scale=0.1)
    (completion,) = byte_answers(
        Constraint("regex", "[ab]{8}"), core=core, logit_bias={a: -100.0, c: 100.0, BYTES_END: 100.0}, temperature=0.0
    )
    assert completion.text == "b" * 8
    (completion,) = byte_answers(Constraint("regex", "a{8}"), logit_bias={a: -100.0, b: 100.0}, temperature=0.0)
    assert completion.text == "a" * 8 and completion.finish_reason == "stop"


def test_an_answer_does_not_run_away_in_white_space():
    """Whatever the model's taste for it: one space at most between two signs, unless the schema says otherwise."""
    bias = dict.fromkeys(byte_tokenizer().encode(" \n\t\r"), 100.0)
    (completion,) = byte_answers(json_constraint(CITY), logit_bias=bias, temperature=0.0, max_tokens=60)
    assert completion.finish_reason == "stop" and json.loads(completion.text)["city"] in ("Paris", "Rome")
    assert re.fullmatch(r'\{ "city" : "\w+" \}', completion.text)
    (completion,) = byte_answers(Constraint("json_schema", '{"type":"object"}'), logit_bias=bias, max_tokens=60)
    assert "  " not in completion.text and "\n" not in completion.text
    schema = {**CITY, "x-guidance": {"whitespace_pattern": r"[ \n]{1,20}"}}
    (completion,) = byte_answers(json_constraint(schema), logit_bias=bias, temperature=0.0, max_tokens=200)
    assert len(completion.text) > 80


def test_an_end_that_is_not_wanted_yet():
    number = Constraint("regex", "[0-9]{1,9}")
    ended = byte_answers(number, n=8)
    assert {item.token_ids[-1] for item in ended if len(item.text) < 9} == {BYTES_END}
    for completion in byte_answers(number, n=8, min_tokens=5):
        assert len(completion.token_ids) >= 5 and completion.finish_reason == "stop"
    for params in ({"ignore_eos": True}, {"min_tokens": 100}):
        for completion in byte_answers(number, n=4, **params):
            # Nothing can be added: it ends without an end token, whatever was asked for.
            assert len(completion.text) == len(completion.token_ids) == 9 and completion.finish_reason == "stop"


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize(("form", "stops"), [("a{3}xyz", "axz"), ('[{]"a": "[b-d]{3}"[}]', '"}'), ("x{9}", "x")])
def test_stops_do_not_break_the_form(form, stops, num_drafts):
    """The form is held to its end, be it that its last token is a stop token; then it ends as it does without stops."""
    whole = byte_answers(Constraint("regex", form), temperature=0.0)[0]
    assert re.fullmatch(form, whole.text)
    stop_token_ids = tuple(byte_tokenizer().encode(stops))
    for params in ({"stop": tuple(stops)}, {"stop_token_ids": stop_token_ids}, {"stop": whole.text[2:4]}):
        core = constrained_core(byte_tokenizer(), BYTES_SIZE, num_drafts=num_drafts)
        (completion,) = byte_answers(Constraint("regex", form), core=core, temperature=0.0, **params)
        assert (completion.text, completion.token_ids) == (whole.text, whole.token_ids)
        assert completion.finish_reason == "stop"


def test_a_stop_token_ends_it_where_the_form_is_whole():
    (x,) = byte_tokenizer().encode("x")
    params = {"stop_token_ids": (x,), "logit_bias": {x: 100.0}, "temperature": 0.0, "max_tokens": 20}
    (completion,) = byte_answers(Constraint("regex", "ax{3}b[x-z]*"), **params)
    assert completion.text == "axxxb" and completion.token_ids[-1] == x and completion.finish_reason == "stop"


def test_lengths_end_it_as_ever():
    (completion,) = byte_answers(Constraint("regex", "a{3}xyz+"), max_tokens=4, temperature=0.0)
    assert completion.text == "aaax" and completion.finish_reason == "length"
    (completion,) = byte_answers(Constraint("regex", "a{3}"), max_tokens=3, temperature=0.0)
    assert completion.text == "aaa" and completion.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model():
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    inputs = prompt(byte_tokenizer())
    (completion,) = byte_answers(Constraint("regex", "[a-f]{6}"), core=core, inputs=inputs, logprobs=1)
    known = list(inputs.token_ids)
    for found in completion.logprobs:
        expected = torch.from_numpy(core.runner.logits(known)).log_softmax(0)
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-4)
        assert found.top[0][0] == int(expected.argmax())
        known.append(found.token_id)


@pytest.mark.parametrize(
    "constraint, message",
    [
        (Constraint("regex", "[a"), "the regular expression cannot be used: .*unclosed character class"),
        (Constraint("regex", "(?=a)b"), "look-ahead"),
        (Constraint("regex", "a\\"), "ends with a single backslash"),
        (Constraint("regex", "\ud800"), "not Unicode text"),
        (Constraint("regex", "x" * (1 << 20) + "y"), "has 1048577 bytes, expected at most 1048576"),
        (Constraint("json_schema", "{"), "the JSON schema is not JSON: "),
        (Constraint("json_schema", "[1]"), r"the JSON schema is '\[1\]', expected an object"),
        (Constraint("json_schema", "false"), "the JSON schema cannot be used"),
        (Constraint("json_schema", '{"items":' * 9000 + "{}" + "}" * 9000), "in more than 201 levels, the limit"),
        (json_constraint({"type": "frob"}), "Invalid type: frob"),
        (json_constraint({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_constraint({"type": "string", "format": "phone"}), "Unknown format: phone"),
        (json_constraint({"type": "integer", "minimum": 5, "maximum": 3}), r"minimum \(5\) is greater than maximum"),
        (json_constraint({"$ref": "https://example.org/a.json"}), "example.org"),
        (json_constraint({"$ref": "#"}), "no text of this vocabulary fits it"),
        (Constraint("lark", "begin: 'a'"), "the grammar cannot be used"),
        (Constraint("lark", 'start: "a" b'), "unknown name"),
        (Constraint("lark", 'start: a\na[max_tokens=3]: /x*/'), "max_tokens"),
        (Constraint("frob", "a"), "constraint kind is 'frob', expected json_schema, regex, lark"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else value.kind,
)  # fmt: skip
@pytest.mark.parametrize("allows_reasoning", [False, True])
def test_what_cannot_be_used_is_refused_before_the_first_step(constraint, message, allows_reasoning):
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    constraint = Constraint(constraint.kind, constraint.source, allows_reasoning)
    loop = EngineLoop(core, threaded=False)
    handle = loop.submit(lambda: prompt(byte_tokenizer()), SamplingParams(constraint=constraint))
    assert not loop.step()
    with pytest.raises(RequestError, match=f"(?s){message}"):
        handle.result(0)


def test_an_engine_without_a_tokenizer_refuses():
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    core.constraints = None
    with pytest.raises(RequestError, match="no tokenizer"):
        core.compile(prompt(byte_tokenizer()), SamplingParams(constraint=GOOD))


def test_a_grammar_that_becomes_too_costly_ends_its_request_alone():
    """After the first letter a million are forced, which no limit allows."""
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    loop = EngineLoop(core, threaded=False)
    costly = Constraint("regex", "[bc]a{1000000}")
    inputs = prompt(byte_tokenizer())
    good, bad, free = (
        loop.submit(lambda: inputs, SamplingParams(max_tokens=40, seed=1, n=n, constraint=constraint))
        for n, constraint in ((1, GOOD), (3, costly), (1, None))
    )
    grammar = core.compile(inputs, SamplingParams(constraint=costly))
    while loop.step():
        pass
    with pytest.raises(RequestError, match=r"the regular expression cannot be followed any further: .*too many"):
        bad.result(0)
    assert good.result(0)[0].token_ids == byte_answers(GOOD, seed=1, max_tokens=40)[0].token_ids
    assert free.result(0)[0].token_ids
    assert core.resources.kv.pool.num_used == 0 and not loop._handles
    # What its matchers shared may be used up: the next one gets a grammar of its own.
    assert grammar.is_broken and core.compile(inputs, SamplingParams(constraint=costly)) is not grammar


def test_constraints_that_compile_hold_up_no_others(monkeypatch):
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    compiled, compile_one = threading.Event(), core.compile

    def compile_late(inputs, params):
        assert params.constraint is None or compiled.wait(60)
        return compile_one(inputs, params)

    monkeypatch.setattr(core, "compile", compile_late)
    loop = EngineLoop(core)
    inputs = prompt(byte_tokenizer())
    unmet = json_constraint({"type": "integer", "maximum": 12345})
    late = [loop.submit(lambda: inputs, SamplingParams(constraint=unmet, seed=0, max_tokens=200)) for _ in range(3)]
    assert loop.submit(lambda: inputs, SamplingParams(max_tokens=5)).result(60)
    assert not any(handle.is_done for handle in late) and loop.stats().num_preparing == 3
    compiled.set()
    expected = byte_answers(unmet, max_tokens=200)[0].token_ids
    assert [handle.result(60)[0].token_ids for handle in late] == [expected] * 3
    loop.close()


def test_a_finished_or_aborted_answer_lets_go_of_its_matcher():
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    (aborted,) = add(core, "a", prompt(byte_tokenizer()), SamplingParams(constraint=GOOD, seed=0))
    finished = add(core, "b", prompt(byte_tokenizer()), SamplingParams(constraint=GOOD, seed=1, n=2))
    matchers = [weakref.ref(sequence.matcher) for sequence in (aborted, *finished)]
    for _ in range(5):
        core.step()
    core.abort("a")
    assert aborted.matcher is None and matchers[0]() is None
    run_all(core)
    assert [matcher() for matcher in matchers] == [None] * 3


def test_what_was_refused_is_not_tried_again_at_once(monkeypatch):
    compiler = ConstraintCompiler(byte_tokenizer(), BYTES_SIZE)
    good, bad = json_constraint({"type": "integer"}), json_constraint({"type": "strin"})
    assert not compiler.knows(good) and not compiler.knows(bad)
    compiler.compile(good)
    tried, run = [], CompileSandbox.run
    monkeypatch.setattr(CompileSandbox, "run", lambda self, grammar: (tried.append(grammar), run(self, grammar)))
    for _ in range(3):
        with pytest.raises(RequestError, match="Invalid type: strin"):
            compiler.compile(bad)
    assert len(tried) == 1 and compiler.knows(good) and compiler.knows(bad)
    monkeypatch.setattr(constraint_module, "REFUSAL_S", 0.0)
    assert not compiler.knows(bad)
    with pytest.raises(RequestError, match="Invalid type: strin"):
        compiler.compile(bad)
    assert len(tried) == 2


def test_grammars_are_kept_for_the_next_request():
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    inputs, thinking = prompt(byte_tokenizer()), prompt(byte_tokenizer(), opens_reasoning=True)

    def compiled(constraint, inputs=inputs):
        return core.compile(inputs, SamplingParams(constraint=constraint))

    assert compiled(GOOD) is compiled(json_constraint(PERSON)) is compiled(GOOD, thinking)
    reasoned = json_constraint(PERSON, True)
    assert compiled(reasoned) is not compiled(GOOD)
    assert compiled(reasoned) is not compiled(reasoned, thinking)
    first = compiled(Constraint("regex", "first"))
    for number in range(40):
        compiled(Constraint("regex", f"a{number}"))
    assert len(core.constraints._grammars) == 32
    assert compiled(Constraint("regex", "first")) is not first


@pytest.fixture(scope="module")
def qwen():
    return qwen_tokenizer()


@pytest.mark.slow
def test_the_vocabulary_of_a_real_model(qwen):
    """Random choices among 150,000 tokens, none of them a special one or one that the tokenizer lacks."""
    core = constrained_core(qwen, QWEN_SIZE, scale=1.0, favour='"}],', favoured=8.0, num_drafts=4)
    favour_nothing_known = np.r_[np.zeros(151_643), np.full(QWEN_SIZE - 151_643, 20.0)].astype(np.float32)
    core.runner.bias += favour_nothing_known
    params = SamplingParams(constraint=GOOD, seed=3, n=3, max_tokens=200)
    for completion in answers(core, prompt(qwen), params):
        assert completion.finish_reason == "stop"
        assert jsonschema_rs.validator_for(PERSON).is_valid(json.loads(completion.text)), completion.text
    # A name is forced as the tokenizer cuts it.
    (completion,) = answers(core, prompt(qwen), SamplingParams(constraint=Constraint("regex", "name_of_the_person")))
    assert list(completion.token_ids) == qwen.encode("name_of_the_person")


@pytest.mark.parametrize("name", ["llama", "smollm"])
def test_vocabularies_of_gguf_files(name):
    """Pieces with a space in front, bytes for what has no piece, and a normaliser that puts a space before a text."""
    tokenizer = Tokenizer.from_gguf(llama_metadata() if name == "llama" else smollm2_metadata())
    size = tokenizer.vocab_size + 8
    core = constrained_core(tokenizer, size, favour="")
    constraints = (Constraint("regex", "the cat in the hat\\. [Hh]at, é€?"), json_constraint(CITY))
    for constraint, pattern in zip(constraints, [r"the cat in the hat\. [Hh]at, é€?", r"(?s)\{.*\}"], strict=True):
        params = SamplingParams(constraint=constraint, max_tokens=300, seed=1, n=2)
        for completion in answers(core, prompt(tokenizer, "the hat"), params):
            assert re.fullmatch(pattern, completion.text) and completion.finish_reason == "stop"
            if name == "llama" and pattern.startswith("the"):
                # As in the middle of a text, where no space is put in front of it.
                cut = [tokenizer.token_bytes(token_id) for token_id in completion.token_ids[:6]]
                assert cut == [b"t", b"he", b" cat", b" in", b" the", b" hat"]


def test_a_model_without_an_end_token():
    bare = byte_tokenizer()
    tokenizer = Tokenizer(bare._backend, special_tokens={}, stop_token_ids=[])
    core = constrained_core(tokenizer, BYTES_SIZE)
    for pattern in (r"[a-c]{3}", r"(ab|abc|b)", r"x(yz)?"):
        for completion in answers(
            core, prompt(tokenizer), SamplingParams(constraint=Constraint("regex", pattern), n=3)
        ):
            assert re.fullmatch(pattern, completion.text) and completion.finish_reason == "stop"


def test_a_vocabulary_that_cannot_spell_the_answer():
    """Letters without z: what forces it ends the request, in words, and neither the step nor the process."""
    letters = {letter: index for index, letter in enumerate("abcxy")}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, special_tokens={}, stop_token_ids=[5])
    compiler = ConstraintCompiler(tokenizer, 6)
    with pytest.raises(RequestError, match="the regular expression cannot be used"):
        compiler.compile(Constraint("regex", "z"))
    matcher = compiler.compile(Constraint("regex", "[ab]cz")).start()
    matcher.advance(letters["a"])
    matcher.forced_token_ids()
    assert "cannot be followed any further" in str(matcher.error)


def test_forced_text_that_the_tokenizer_would_change(qwen):
    """Qwen's tokenizer composes e and the accent after it; the schema does not."""
    core = constrained_core(qwen, QWEN_SIZE)
    (completion,) = answers(
        core, prompt(qwen), SamplingParams(constraint=json_constraint({"const": "e\u0301<|im_end|>x"}))
    )
    assert json.loads(completion.text) == "e\u0301<|im_end|>x" and completion.finish_reason == "stop"


def forced_core(tokenizer, size, text):
    """A model that wants to write `text` and then end, one token after the other as the tokenizer cuts it."""
    core = constrained_core(tokenizer, size, scale=0.01)
    ids = [*tokenizer.encode(text), tokenizer.stop_token_ids[0]]
    noise = core.runner.logits

    def logits(token_ids):
        row = noise(token_ids)
        done = len(token_ids) - core.num_prompt_tokens
        if done < len(ids) and token_ids[core.num_prompt_tokens :] == ids[:done]:
            row[ids[done]] += 50.0
        return row

    core.runner.logits = logits
    return core


@pytest.mark.parametrize("name", ["bytes", "qwen"])
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("tail", ["", "\n\n", " "])
def test_thoughts_are_free(name, opens, tail, request):
    tokenizer, size = (
        (byte_tokenizer(), BYTES_SIZE) if name == "bytes" else (request.getfixturevalue("qwen"), QWEN_SIZE)
    )
    thoughts = 'Hm: {"city": 3}? </thin <b>\n\n"<think>' + ("" if opens else "<think>")
    wanted = ("" if opens else "<think>") + thoughts + "</think>" + tail + '{"city": "Rome"}'
    inputs = prompt(tokenizer, "Where?", opens_reasoning=opens)
    params = SamplingParams(constraint=json_constraint(CITY, True), temperature=0.0, max_tokens=300)
    core = forced_core(tokenizer, size, wanted)
    core.num_prompt_tokens = len(inputs.token_ids)
    (completion,) = answers(core, inputs, params)
    assert completion.text == wanted and completion.finish_reason == "stop"
    if name == "qwen":
        assert qwen_tokenizer().token_id("</think>") in completion.token_ids
    # Without leave to think the first token is the document's.
    core = forced_core(tokenizer, size, wanted)
    core.num_prompt_tokens = len(inputs.token_ids)
    strict = SamplingParams(constraint=json_constraint(CITY), temperature=0.0, max_tokens=300)
    (completion,) = answers(core, inputs, strict)
    assert json.loads(completion.text)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("name", ["bytes", "qwen"])
def test_an_answer_may_do_without_thoughts(name, request):
    tokenizer, size = (
        (byte_tokenizer(), BYTES_SIZE) if name == "bytes" else (request.getfixturevalue("qwen"), QWEN_SIZE)
    )
    for constraint, text in (
        (json_constraint(CITY, True), '{"city": "Rome"}'),
        (Constraint("regex", "<[a-z]+>!", True), "<thing>!"),
        (Constraint("lark", ARITHMETIC, True), "1+(2*3)"),
    ):
        core = forced_core(tokenizer, size, text)
        inputs = prompt(tokenizer, "Where?")
        core.num_prompt_tokens = len(inputs.token_ids)
        (completion,) = answers(core, inputs, SamplingParams(constraint=constraint, temperature=0.0, max_tokens=300))
        assert completion.text == text and completion.finish_reason == "stop"


def test_nothing_ends_within_thoughts():
    """Neither an end token nor a wrong beginning of the answer, however much the model wants it."""
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, scale=1.0, favour="</think>", favoured=3.0)
    core.runner.bias[BYTES_END] = 30.0
    inputs = prompt(byte_tokenizer(), opens_reasoning=True)
    sequences = add(
        core, "a", inputs, SamplingParams(constraint=json_constraint(CITY, True), seed=0, n=3, max_tokens=1500)
    )
    run_all(core)
    for sequence in sequences:
        completion = core.completion(sequence)
        assert completion.finish_reason == "length" or json.loads(completion.text.split("</think>", 1)[1])
