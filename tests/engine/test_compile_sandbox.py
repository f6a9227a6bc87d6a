"""Constraints that are made to do harm: refused in words, within bounds of time and memory."""

import gc
import json
import os
import signal

import pytest
from constrained_model import BYTES_SIZE, add, byte_tokenizer, constrained_core, prompt

from tilewright.engine.constraint import sandbox as constraint_trial
from tilewright.engine.constraint.sandbox import CompileSandbox
from tilewright.process import child
from tilewright.types import Constraint, RequestError, SamplingParams, TransientError

pytestmark = pytest.mark.slow

PRIMES = (7, 11, 13, 17, 19, 23)


def compile_one(constraint):
    core = constrained_core(byte_tokenizer(), BYTES_SIZE)
    core.compile(prompt(byte_tokenizer()), SamplingParams(constraint=constraint))


def chain(length, link):
    """A schema whose definitions refer to one another in a long row."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}})


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", chain(5000, lambda rest: {"type": "object", "properties": {"a": rest}})),
        Constraint("json_schema", chain(9000, lambda rest: {"allOf": [rest]})),
        Constraint("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}?\n" for i in range(9000)) + 'r9000: "x"'),
    ],
    ids=["objects", "references", "rules"],
)
def test_what_overflows_the_stack_does_so_elsewhere(constraint):
    with pytest.raises(RequestError, match="nested too deeply, or takes more than 1024 MiB to compile"):
        compile_one(constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "".join(f"(a{i}|[bc]*)" for i in range(60_000))),
        Constraint("json_schema", json.dumps({"type": "integer", "allOf": [{"multipleOf": p} for p in PRIMES]})),
        Constraint(
            "json_schema", json.dumps({"type": "string", "allOf": [{"pattern": f"a.*b{i}"} for i in range(60)]})
        ),
    ],
    ids=["concatenation", "multiples", "patterns"],
)
def test_what_never_ends_is_stopped(monkeypatch, constraint):
    monkeypatch.setattr(constraint_trial, "TIMEOUT_S", 1.0)
    with pytest.raises(RequestError, match=r"cannot be used: it takes more than 1 s to compile"):
        compile_one(constraint)
    monkeypatch.undo()
    compile_one(Constraint("regex", "after (it|the end)"))


def test_a_trial_that_cannot_run_is_not_the_users_mistake(monkeypatch):
    monkeypatch.setattr(child.sys, "executable", "/usr/bin/false")
    with pytest.raises(TransientError, match=r"the process that tries constraints did not start \(status 1\)"):
        CompileSandbox(300, {}, [299]).run("{}")


def test_the_process_ends_with_its_owner():
    trial = CompileSandbox(300, {}, [299])
    trial.run(json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]}))
    process = trial._process
    assert process.status is None
    del trial
    gc.collect()
    assert process.status is not None


def test_large_constraints_go_through_their_trial():
    fields = {f"field_{i}": {"type": "string", "description": "x" * 50} for i in range(100)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    compile_one(Constraint("json_schema", json.dumps(schema)))
    compile_one(Constraint("lark", 'start: "a" <|end|> "b" <[256]>\n' + "// nothing\n" * 500))
    with pytest.raises(RequestError, match=r'the JSON schema cannot be used: Unimplemented keys: \["uniqueItems"\]'):
        compile_one(Constraint("json_schema", json.dumps({**schema, "uniqueItems": True})))
    with pytest.raises(RequestError, match="unknown special token"):
        compile_one(Constraint("lark", "start: <|frob|>\n" + "// nothing\n" * 500))


def alternatives(depth):
    """A product of choices: 2 ** depth ways."""
    choice = [
        {"anyOf": [{"type": "object", "required": [f"a{i}"]}, {"type": "object", "required": [f"b{i}"]}]}
        for i in range(depth)
    ]
    return json.dumps({"allOf": choice})


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "a{1000000}"),
        Constraint("regex", "[bc]((((a{100}){100}){100}){100}){100}"),
        Constraint("regex", "((((a?){100}){100}){100}){100}"),
        Constraint("regex", r"(.|\n)*a(.|\n){60}"),
        Constraint("regex", "((a*)*)*b"),
        Constraint("regex", r"(\p{L}\p{N}?){1000}"),
        Constraint("regex", "(" * 1500 + "a" + ")" * 1500),
        Constraint("json_schema", '{"items":' * 200 + "{}" + "}" * 200),
        Constraint("json_schema", alternatives(16)),
        Constraint("json_schema", '{"type": "array", "minItems": 1000000000, "items": {"type": "integer"}}'),
        Constraint("json_schema", '{"type": "string", "minLength": 999999999, "maxLength": 1000000000}'),
        Constraint("json_schema", '{"type": "integer", "multipleOf": 999999937}'),
        Constraint("lark", 'start: a{1000000}\na: b{1000000}\nb: "x"'),
        Constraint("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "x"'),
        Constraint("lark", 'start: e\ne: e e e | e e | /[a-z]/ | /[a-z][a-z]/ | ""'),
    ],
    ids=lambda constraint: constraint.source[:24],
)
def test_small_ones_are_followed_or_refused(constraint):
    """Most are refused before the first step, and some in the middle of an answer, at a mask that costs too much."""
    core = constrained_core(byte_tokenizer(), BYTES_SIZE, favour="abx")
    try:
        add(core, "a", prompt(byte_tokenizer()), SamplingParams(constraint=constraint, seed=0, max_tokens=40))
    except RequestError as error:
        assert "cannot be used" in str(error)
        return
    failures = {}
    while core.has_work:
        failures |= core.step().failures
    assert all("cannot be followed any further" in str(error) for error in failures.values())
    assert core.resources.kv.pool.num_used == 0


def run_one(trial, text="a"):
    trial.run(json.dumps({"grammars": [{"lark_grammar": f'start: "{text}"'}]}))


def when_asked(monkeypatch, act, num_times):
    """Has `act` done to the first processes that are asked for a grammar, when each is."""
    ask, left = constraint_trial._ask, [num_times]

    def acting(process, message, timeout_s):
        if "grammar" in message and left[0]:
            left[0] -= 1
            act(process.pid)
        return ask(process, message, timeout_s)

    monkeypatch.setattr(constraint_trial, "_ask", acting)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_trial_that_is_killed_is_repeated(monkeypatch, number):
    """Before it is asked, and while it compiles; SIGABRT is how memory ends, which earlier grammars may have taken."""
    trial = CompileSandbox(300, {}, [299])
    run_one(trial)
    os.kill(trial._process.pid, number)
    trial._process.wait()
    run_one(trial, "b")
    first = trial._process
    when_asked(monkeypatch, lambda pid: os.kill(pid, number), 1)
    run_one(trial, "c")
    assert first.status == -number and trial._process.status is None


def test_a_trial_that_is_killed_each_time_is_nobodys_mistake(monkeypatch):
    """And is not remembered: the next request with the constraint is served."""
    constraint = Constraint("regex", "a tile")
    core, asked = constrained_core(byte_tokenizer(), BYTES_SIZE), prompt(byte_tokenizer())
    when_asked(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL), 2)
    with pytest.raises(TransientError, match=r"the process that tries constraints was ended \(signal SIGKILL\)"):
        core.compile(asked, SamplingParams(constraint=constraint))
    assert core.compile(asked, SamplingParams(constraint=constraint)) is not None


def test_a_trial_that_is_stopped_is_repeated(monkeypatch):
    """Also when it is given more than a pipe holds, which it does not read."""
    monkeypatch.setattr(constraint_trial, "TIMEOUT_S", 0.5)
    trial = CompileSandbox(300, {}, [299])
    when_asked(monkeypatch, lambda pid: os.kill(pid, signal.SIGSTOP), 1)
    run_one(trial, "a" * 200_000)
    when_asked(monkeypatch, lambda pid: os.kill(pid, signal.SIGSTOP), 2)
    with pytest.raises(TransientError, match="did not answer for"):
        run_one(trial, "b")
