import contextlib
import json
import random

import jsonschema_rs
import pytest
from checkpoint_files import write_qwen3_vl_folder
from fuzzing import num_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from output_answers import HERMES, LLAMA, SYNTAXES, TOOLS, XML, parse, tool

from tilewright.engine.constraint.compiler import ConstraintCompiler
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.server.output import check_tools, tool_constraint
from tilewright.server.output.json_syntax import LlamaSyntax
from tilewright.types import Constraint, RequestError

BYTES = LLTokenizer("byte")
END_ID = BYTES.eos_token


class ByBytes:
    """A tokenizer as llguidance takes it, in which tags that are not special tokens are text like any other."""

    bos_token_id = None

    def __init__(self, tokenizer):
        self.eos_token_id = tokenizer.stop_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._encode = tokenizer.encode

    def __call__(self, text):
        return self._encode(text.decode())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def qwen3(tokenizer):
    return LLTokenizer(TokenizerWrapper(ByBytes(tokenizer)))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size)


def matcher(tool_syntax, tools, choice="required", parallel=True, tokenizer=BYTES):
    constraint = tool_constraint(tool_syntax, tools, choice, parallel=parallel, allows_reasoning=False)
    found = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(constraint.source), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepts(found, text, tokenizer=BYTES):
    found.reset()
    ids = tokenizer.tokenize_str(text)
    return found.validate_tokens(ids) == len(ids) and found.consume_tokens(ids) and found.is_accepting()


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def written(tool_syntax, calls):
    """Calls as the syntax's templates write them."""
    if tool_syntax is XML:
        texts = []
        for name, arguments in calls:
            values = {key: value if isinstance(value, str) else dumps(value) for key, value in arguments.items()}
            parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
            texts.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
        return "\n".join(texts)
    if tool_syntax is HERMES:
        texts = [dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


GOOD = [
    ("get_weather", {"city": "Berlin"}),
    ("get_weather", {"city": 'a "b" \\ {', "days": -3, "is_metric": False, "hours": [1, 2.5], "where": {"zip": "1"}}),
    ("get_weather", {"city": "", "level": None, "any": "x"}),
    ("stop.now", {}),
]
BAD = [
    ("get_weathers", {"city": "Berlin"}),
    ("get", {"city": "Berlin"}),
    ("get_weather", {}),
    ("get_weather", {"days": 3}),
    ("get_weather", {"city": "Berlin", "days": "three"}),
    ("get_weather", {"city": "Berlin", "days": 1.5}),
    ("get_weather", {"city": "Berlin", "is_metric": 1}),
    ("get_weather", {"city": "Berlin", "hours": ["x"]}),
    ("get_weather", {"city": "Berlin", "where": {"zip": 5}}),
    ("get_weather", {"city": "Berlin", "county": "x"}),
    ("get_weather", {"days": 3, "city": "Berlin"}),
    ("stop.now", {"city": "Berlin"}),
]


@pytest.mark.parametrize("name", SYNTAXES)
def test_good_calls_are_admitted_and_bad_ones_are_not(name, qwen3):
    tool_syntax = SYNTAXES[name]
    for tokenizer in (BYTES, qwen3):
        found = matcher(tool_syntax, TOOLS, tokenizer=tokenizer)
        for call in GOOD:
            assert accepts(found, written(tool_syntax, [call]), tokenizer), call
            assert parse(written(tool_syntax, [call]), tool_syntax).calls == [[call[0], json.dumps(call[1])]]
        for call in BAD:
            assert not accepts(found, written(tool_syntax, [call]), tokenizer), call
        assert accepts(found, written(tool_syntax, GOOD), tokenizer)
        for text in ("", "Sure.", " " + written(tool_syntax, GOOD), written(tool_syntax, GOOD) + " ", "{}"):
            assert not accepts(found, text, tokenizer)


@pytest.mark.parametrize("name", SYNTAXES)
def test_one_call_without_parallel_tool_calls(name):
    tool_syntax = SYNTAXES[name]
    found = matcher(tool_syntax, TOOLS, parallel=False)
    assert accepts(found, written(tool_syntax, GOOD[:1]))
    assert not accepts(found, written(tool_syntax, GOOD[:2]))


def test_a_template_that_takes_one_call_is_given_one():
    found = matcher(LlamaSyntax(takes_several=False), TOOLS, parallel=True)
    assert accepts(found, written(LLAMA, GOOD[:1]))
    assert not accepts(found, written(LLAMA, GOOD[:2]))


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_named_tool_alone(name):
    tool_syntax = SYNTAXES[name]
    found = matcher(tool_syntax, TOOLS, {"type": "function", "function": {"name": "stop.now"}})
    assert accepts(found, written(tool_syntax, [("stop.now", {})]))
    assert not accepts(found, written(tool_syntax, GOOD[:1]))


def test_the_tokens_of_tags_are_admitted(qwen3):
    """A model writes <tool_call> as one token, not as its characters."""
    (tag,) = qwen3.tokenize_str("<tool_call>")
    assert qwen3.decode_bytes([tag]) == b"<tool_call>"
    for tool_syntax in (HERMES, XML):
        assert matcher(tool_syntax, TOOLS, tokenizer=qwen3).compute_ff_tokens()[0] == tag


def test_what_the_constraint_carries():
    constraint = tool_constraint(HERMES, TOOLS, "required", parallel=True, allows_reasoning=True)
    names = [entry["function"]["name"] for entry in TOOLS]
    subject = f"one of the tools {', '.join(names)}"
    assert constraint == Constraint("lark", constraint.source, allows_reasoning=True, subject=subject)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "expected at least one tool"),
        (TOOLS, "auto", "tool_choice is 'auto'"),
        (TOOLS, {"type": "custom", "custom": {"name": "stop.now"}}, "tool_choice is {'type': 'custom'"),
        (TOOLS, {"type": "function", "name": "stop.now"}, "tool_choice is"),
        (TOOLS, {"type": "function", "function": {"name": "go"}}, "names 'go', expected .* get_weather, stop.now"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", SYNTAXES)
def test_what_cannot_be_held_to_is_refused(name, tools, choice, message):
    with pytest.raises(RequestError, match=message):
        tool_constraint(SYNTAXES[name], tools, choice, parallel=True, allows_reasoning=False)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([tool("f", {"a": {"type": "strin"}})], "the tool f cannot be used: Invalid type: strin"),
        ([tool("f", {"a": {"type": "string", "format": "x"}}, strict=True)], "f cannot be used: Unknown format: x"),
        ([tool("g"), tool("f", {"a": {"$ref": "#/$defs/A"}})], "one of the tools g, f cannot be used: .*A"),
        ([tool("f", {"a": {"enum": ["x" * (1 << 20)]}})], "the tool f has [0-9]+ bytes, expected at most"),
    ],
)
def test_schemas_that_are_none_are_refused_when_they_are_compiled(tools, message, compiler):
    constraint = tool_constraint(HERMES, tools, "required", parallel=True, allows_reasoning=False)
    with pytest.raises(RequestError, match=message):
        compiler.compile(constraint)


def test_what_xml_cannot_write_is_refused():
    for properties in ({"a>b": {}}, {"a\nb": {}}, {"": {}}, {"a": {"enum": ["x</parameter>"]}}):
        with pytest.raises(RequestError, match=r"expected no|cannot"):
            tool_constraint(XML, [tool("f", properties)], "required", parallel=False, allows_reasoning=False)


def test_xml_strings_by_their_schema():
    properties = {
        "unit": {"type": "string", "enum": ["c", "fa\nhr", "5"]},
        "sort": {"const": "up"},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "mode": {"anyOf": [{"enum": ["on", "off"]}, {"type": "null"}]},
        "size": {"type": ["string", "integer"], "maxLength": 2},
        "kind": {"$ref": "#/$defs/Kind"},
    }
    tools = [tool("f", properties)]
    tools[0]["function"]["parameters"]["$defs"] = {"Kind": {"type": "string", "enum": ["x", "y"]}}
    found = matcher(XML, tools)
    for key, good, bad in [
        ("unit", ["c", "fa\nhr", "5"], ["f", "", '"c"']),
        ("sort", ["up"], ["down"]),
        ("code", ["ab", "\n\né", "abc"], ["a", "abcd"]),
        ("mode", ["on", "null"], ["null ", "On"]),
        ("size", ["ab", "12345"], ["abc", "1.25"]),
        ("kind", ["x"], ["z"]),
    ]:
        for value in good:
            assert accepts(found, written(XML, [("f", {key: value})])), (key, value)
            (call,) = parse(written(XML, [("f", {key: value})]), XML, tools=tools).calls
            expected = {"null": None, "12345": 12345}.get(value, value)
            assert json.loads(call[1]) == {key: expected}
        for value in bad:
            assert not accepts(found, written(XML, [("f", {key: value})])), (key, value)


def test_free_parameters_are_free():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for tool_syntax in (HERMES, LLAMA):
        assert accepts(matcher(tool_syntax, tools), written(tool_syntax, [("f", {"any": [{"thing": None}]})]))
    tools = [tool("f", {"a": {"type": "integer"}})]
    tools[0]["function"]["parameters"]["additionalProperties"] = {"type": "string"}
    for tool_syntax in (HERMES, LLAMA):
        assert accepts(matcher(tool_syntax, tools), written(tool_syntax, [("f", {"a": 1, "b": "c"})]))
        assert not accepts(matcher(tool_syntax, tools), written(tool_syntax, [("f", {"a": 1, "b": 2})]))


KEYS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="<>"), min_size=1, max_size=5
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8).filter(
    lambda text: "</" not in text
)
SCALARS = [
    ({"type": "integer"}, st.integers(-(10**9), 10**9)),
    ({"type": "number", "minimum": -5, "maximum": 5}, st.integers(-5, 5)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"type": "string"}, TEXTS),
    ({"enum": ["a", "b c"]}, st.sampled_from(["a", "b c"])),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, st.none() | st.integers(-9, 9)),
]


@st.composite
def schemas(draw, depth=2):
    """(a schema, a strategy of values that fit it)."""
    kind = draw(st.sampled_from(["scalar", "array", "object"] if depth else ["scalar"]))
    if kind == "scalar":
        return draw(st.sampled_from(SCALARS))
    if kind == "array":
        items, values = draw(schemas(depth=depth - 1))
        return {"type": "array", "items": items, "maxItems": 3}, st.lists(values, max_size=3)
    return draw(objects(depth=depth - 1))


@st.composite
def objects(draw, depth=2):
    members = draw(st.dictionaries(KEYS, st.tuples(schemas(depth=depth), st.booleans()), max_size=3))
    properties = {key: schema for key, ((schema, _), _) in members.items()}
    required = [key for key, (_, is_required) in members.items() if is_required]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    drawn = {
        key: values.map(lambda value: [value]) if is_required else st.just([]) | values.map(lambda value: [value])
        for key, ((_, values), is_required) in members.items()
    }

    def in_order(found):
        """In the schema's order, which is the one a grammar admits."""
        return {key: found[key][0] for key in properties if found[key]}

    return schema, st.fixed_dictionaries(drawn).map(in_order)


@st.composite
def calls_of_tools(draw):
    """(tools, calls of them with arguments that fit)."""
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9_.-]{0,5}", fullmatch=True), min_size=1, max_size=3, unique=True))
    found = {name: draw(objects()) for name in names}
    tools = [{"type": "function", "function": {"name": name, "parameters": found[name][0]}} for name in names]
    called = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    return tools, [(name, draw(found[name][1])) for name in called]


@settings(max_examples=num_cases(40), deadline=None)
@given(drawn=calls_of_tools())
@pytest.mark.parametrize("name", SYNTAXES)
def test_fitting_calls_are_admitted_and_read_back(name, drawn):
    tool_syntax = SYNTAXES[name]
    tools, calls = drawn
    check_tools(tools)
    text = written(tool_syntax, calls)
    assert accepts(matcher(tool_syntax, tools), text)
    answer = parse(text, tool_syntax, tools=tools)
    assert [(called, json.loads(arguments)) for called, arguments in answer.calls] == calls
    assert answer.content == ""


# What a walk tries first, so that it comes to an end: the ends of strings, of values and of the answer.
ENDINGS = ['"', "\n</parameter>\n", "}", "]", "\n</tool_call>", "</function>"]


def walk(found, randomness):
    """The text of an answer that the grammar admits at every byte."""
    ids = []
    while not found.is_stopped():
        mask = int.from_bytes(found.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(BYTES.vocab_size) if mask >> token_id & 1]
        if END_ID in allowed and (len(ids) > 600 or randomness.random() < 0.5):
            break
        chosen = [randomness.choice([token_id for token_id in allowed if token_id != END_ID] or allowed)]
        if randomness.random() < 0.3 + len(ids) / 1000:
            endings = [BYTES.tokenize_str(text) for text in randomness.sample(ENDINGS, len(ENDINGS))]
            chosen = next((ending for ending in endings if found.validate_tokens(ending) == len(ending)), chosen)
        assert found.consume_tokens(chosen)
        ids += chosen
    return BYTES.decode_bytes([token_id for token_id in ids if token_id != END_ID]).decode()


@settings(max_examples=num_cases(25), deadline=None)
@given(drawn=calls_of_tools(), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", SYNTAXES)
def test_what_is_admitted_is_a_fitting_call(name, drawn, seed):
    tool_syntax = SYNTAXES[name]
    tools, _ = drawn
    text = walk(matcher(tool_syntax, tools), random.Random(seed))
    answer = parse(text, tool_syntax, tools=tools)
    schemas_by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert answer.calls, text
    assert answer.content == answer.reasoning == ""
    for called, arguments in answer.calls:
        jsonschema_rs.validate(schemas_by_name[called], json.loads(arguments))


WORDS = [
    "type",
    "properties",
    "required",
    "$ref",
    "$defs",
    "anyOf",
    "allOf",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "a",
]
SCHEMAS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | st.sampled_from(["object", "string", "integer", "#/$defs/a", "#", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=num_cases(60), deadline=None)
@given(parameters=st.dictionaries(st.sampled_from(WORDS), SCHEMAS, max_size=4), is_strict=st.booleans())
@pytest.mark.parametrize("name", SYNTAXES)
def test_any_schema_is_a_grammar_or_refused(name, parameters, is_strict, compiler):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": is_strict}}]
    try:
        check_tools(tools)
    except RequestError:
        return
    parse("<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", SYNTAXES[name], tools=tools)
    with contextlib.suppress(RequestError):
        compiler.compile(tool_constraint(SYNTAXES[name], tools, "required", parallel=True, allows_reasoning=False))


def test_parameters_made_to_crash_are_refused(compiler):
    """A chain of references overflows the compiler's stack: in another process, which is replaced."""
    length = 8000
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "minItems": 1} for i in range(length)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "required": ["x"]}
    hostile = {**schema, "$defs": {**links, f"d{length}": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": hostile}}]
    with pytest.raises(RequestError, match=r"the tool f cannot be used: it is nested too deeply"):
        compiler.compile(tool_constraint(HERMES, tools, "required", parallel=False, allows_reasoning=False))
    assert compiler.compile(tool_constraint(HERMES, TOOLS, "required", parallel=False, allows_reasoning=False))
