import itertools
import json
import time

import pytest
from checkpoint_files import DATA
from hypothesis import given
from hypothesis import strategies as st
from output_answers import HERMES, LLAMA, SYNTAXES, TOOLS, XML, Answer, parse

from tilewright.inputs.chat_template import ChatTemplate
from tilewright.server.output import OutputParser, has_reasoning, tool_syntax_of

CALLS = [
    ("get_weather", {"city": 'Köln "Mitte"\n\\ </tool_call>', "days": 3, "hours": [1.5, -2], "where": {"zip": "1}2"}}),
    ("stop.now", {}),
    ("get_weather", {"city": "<tool_call>{", "is_metric": True, "level": None}),
]


def rendered(template, content, calls, reasoning=None):
    """What the model of this template says to have said this, by the template itself."""
    messages = [{"role": "user", "content": "Go"}]
    prompt = ChatTemplate((DATA / template).read_text(), {}).render(messages, tools=TOOLS)
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    said = {"role": "assistant", "content": content, "tool_calls": tool_calls, "reasoning_content": reasoning}
    text = ChatTemplate((DATA / template).read_text(), {}).render(
        [*messages, said], tools=TOOLS, add_generation_prompt=False
    )
    assert text.startswith(prompt.removesuffix("<think>\n"))
    return text.removeprefix(prompt.removesuffix("<think>\n")).removesuffix("<|im_end|>\n")


def llama_answer(calls, separator="; ", mark=""):
    said = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return mark + separator.join(said)


TRANSCRIPTS = {
    "qwen3": (HERMES, rendered("qwen3.jinja", "Let me see. < \n", CALLS, "I wonder <tool_call>\n")),
    "qwen3, no content": (HERMES, rendered("qwen3.jinja", "", CALLS[::-1])),
    "qwen3_vl": (HERMES, rendered("qwen3_vl.jinja", "Let me see.", CALLS)),
    "qwen3_5": (XML, rendered("qwen3_5.jinja", "Let me see.", CALLS, "I <function=stop.now> wonder")),
    "llama": (LLAMA, llama_answer(CALLS)),
    "llama, marked": (LLAMA, llama_answer(CALLS, "\n", "<|python_tag|>")),
    "hermes, cut off": (HERMES, 'So:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kö\\'),
    "hermes, arguments first": (
        HERMES,
        '\n <tool_call>{"arguments" : {"city": [{}, "}"], "name": 1} , "name":"stop.now"}</tool_call>\n',
    ),
    "hermes, malformed": (HERMES, "a\n<tool_call>\n{oops\n</tool_call> <tool_<tool_call> <tool_call>{} b \n"),
    "hermes, braces missing": (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {"b": 1</tool_call>\n<tool_call>{"name": "c"',
    ),
    "xml, cut off": (XML, "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</param"),
    "xml, malformed": (XML, "a <function=nobody>\n<tool_call>\n<func\n<tool_call><function=stop.now>b</function> c"),
    "llama, another's JSON": (LLAMA, ' {"name": "Ann", "parameters": {}}; {"name": "stop.now"}'),
    "llama, then text": (LLAMA, '{"name": "stop.now", "parameters": {}} ; then {"name": "stop.now"}'),
    "reasoning": (None, "\n<think>\n\n hm </thin\n\n</think>\n\n\n </think> yes \n"),
    "reasoning cut off": (HERMES, "<think>hm\n\n</thi"),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_cuts_change_nothing(name):
    """One cut anywhere, a cut everywhere, and pieces of each length."""
    tool_syntax, text = TRANSCRIPTS[name]
    for opens_reasoning, splits_reasoning in itertools.product([False, True], repeat=2):
        options = {"opens_reasoning": opens_reasoning, "splits_reasoning": splits_reasoning}
        whole = parse(text, tool_syntax, **options)
        for cut in range(len(text)):
            assert parse([text[:cut], text[cut:]], tool_syntax, **options) == whole
        for length in (1, 2, 3, 5, 8, 13):
            texts = [text[start : start + length] for start in range(0, len(text), length)]
            assert parse(texts, tool_syntax, **options) == whole


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=stop.now>", "<function=", "</function>", "<parameter=city>",
    "<parameter=days>", "</parameter>", "<think>", "</think>", "<|python_tag|>", '{"name": "stop.now"',
    '"name": "get_weather"', '"parameters": {', '"arguments": {', "{", "}", "[", "]", ";", ",", ":", '"', "\\", "\n",
    " ", "<", ">", "3", "True", "null", "a", "ü", "😀",
]  # fmt: skip


@given(
    texts=st.lists(st.sampled_from(FRAGMENTS), max_size=30),
    cuts=st.lists(st.integers(0, 300), max_size=30),
    name=st.sampled_from([*SYNTAXES, None]),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_any_text_is_the_same_however_it_is_cut(texts, cuts, name, flags):
    text = "".join(texts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    options = {"opens_reasoning": flags[0], "splits_reasoning": flags[1]}
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = parse(text, SYNTAXES.get(name), **options)
    assert parse(pieces, SYNTAXES.get(name), **options) == whole
    assert parse(list(text), SYNTAXES.get(name), **options) == whole
    if not whole.calls and not flags[1]:
        assert whole.content == text, "text that is no call passes as it is"


def arguments_of(answer):
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "qwen3_5", "llama", "llama, marked"])
def test_what_a_template_writes_is_read_back(name):
    tool_syntax, text = TRANSCRIPTS[name]
    answer = parse(text, tool_syntax)
    assert arguments_of(answer) == CALLS
    assert answer.content == {"qwen3": "Let me see. <", "llama": "", "llama, marked": ""}.get(name, "Let me see.")
    assert answer.reasoning == {"qwen3": "I wonder <tool_call>", "qwen3_5": "I <function=stop.now> wonder"}.get(
        name, ""
    )
    assert answer.order == [kind for kind in ("reasoning", "content") if getattr(answer, kind)] + ["call"]


def test_nothing_is_held_longer_than_it_must():
    def steps(tool_syntax, texts):
        parser = OutputParser(tool_syntax=tool_syntax, tools=TOOLS, opens_reasoning=False, splits_reasoning=True)
        for text in texts:
            pieces = parser.push(text)
            yield "".join(
                piece.tool_call.name or piece.tool_call.arguments
                if piece.tool_call
                else piece.content or piece.reasoning
                for piece in pieces
            )

    assert list(steps(HERMES, ["a", " ", "b", "<", "to", "x", "<tool_call>", "y"])) == [
        "a", "", " b", "", "", "<tox", "", "<tool_call>y",
    ]  # fmt: skip
    call = ["<tool_call>\n{", '"name": "f', '"', ', "arguments": ', '{"a', '": "b', '\\"', '"}', "}\n</tool_call>"]
    assert list(steps(HERMES, call)) == ["", "", "f", "", '{"a', '": "b', '\\"', '"}', ""]
    call = ["<tool_call>\n<function=get", "_weather>", "\n<parameter=city>", "\nKö", "ln", "\n", "\n</param", "eter>"]
    assert list(steps(XML, call)) == ["", "get_weather", '{"city": ', '"Kö', "ln", "", "\\n", '"']
    assert list(steps(LLAMA, ["{", '"name": "stop', '.now"', ', "parameters": ', "{", "}", "}"])) == [
        "", "", "", "", "stop.now{", "}", "",
    ]  # fmt: skip
    assert list(steps(LLAMA, ["{", '"na', 'me": "Ann"', ","])) == ["", "", '{"name": "Ann"', ","]
    assert list(steps(LLAMA, ["Well", "{"])) == ["Well", "{"]
    assert list(steps(HERMES, ["\n<thi", "nk>\n", "a", "\n", "b\n\n</th", "ink>\n", "\nc"])) == [
        "",
        "",
        "a",
        "",
        "\nb",
        "",
        "c",
    ]


@pytest.mark.parametrize(("tool_syntax", "template"), [(HERMES, "qwen3.jinja"), (XML, "qwen3_5.jinja")])
def test_nothing_of_a_call_that_was_cut_off_leaks(tool_syntax, template):
    text = rendered(template, "So", [("get_weather", {"city": "Köln", "days": 3})])
    text = text[text.index("So") :]
    for end in range(len(text)):
        answer = parse(text[:end], tool_syntax)
        assert answer.content == ("So" if answer.calls else text[:end])
        assert [name for name, _ in answer.calls] == ["get_weather"] * len(answer.calls)


@pytest.mark.parametrize("tool_syntax", [HERMES, XML, LLAMA])
def test_nothing_of_a_further_call_that_was_cut_off_is_content(tool_syntax):
    """Wherever the answer ends: beside calls, half a tag or half a name is not content."""
    calls = {
        HERMES: ['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>', "\n"],
        XML: [
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
            "\n",
        ],
        LLAMA: ['{"name": "get_weather", "parameters": {"city": "Köln"}}', "; "],
    }
    call, between = calls[tool_syntax]
    for end in range(len(call), 2 * len(call) + len(between)):
        answer = parse((call + between + call)[:end], tool_syntax)
        assert answer.content == "" and answer.calls[0] == ["get_weather", '{"city": "Köln"}']
        assert {name for name, _ in answer.calls} == {"get_weather"}
    assert parse(f"{call}\nso <b", HERMES if tool_syntax == LLAMA else tool_syntax).content.endswith("so <b")


def test_reasoning():
    def said(text, **options):
        answer = parse(text, None, **options)
        return answer.reasoning, answer.content

    assert said("<think>\nhm\n\nyes\n</think>\n\nGood.") == ("hm\n\nyes", "Good.")
    assert said(" \n<think>hm</think>Good.\n") == ("hm", "Good.\n")
    assert said("hm\n</think>\n\nGood.", opens_reasoning=True) == ("hm", "Good.")
    assert said("\n\n  hm\n</think>Good.", opens_reasoning=True) == ("  hm", "Good.")
    assert said("<think>\nhm</think>Good.", opens_reasoning=True) == ("hm", "Good.")
    assert said("hm\n</think>\n\nGood.") == ("", "hm\n</think>\n\nGood.")
    assert said("Good. <think>hm</think>") == ("", "Good. <think>hm</think>")
    assert said("<think>\n\n</think>\n\nGood.") == ("", "Good.")
    assert said("<think>hm\n</th") == ("hm\n</th", "")
    assert said("<think>a</think>\n<think>b</think>") == ("a", "<think>b</think>")
    text = " <think>\nhm\n</think>\n\nGood.\n"
    assert said(text, splits_reasoning=False) == ("", text)
    assert said("hm\n</think>\n\nGood.", opens_reasoning=True, splits_reasoning=False) == ("", "hm\n</think>\n\nGood.")


@pytest.mark.parametrize("splits_reasoning", [True, False])
def test_no_calls_in_reasoning(splits_reasoning):
    call = '<tool_call>\n{"name": "stop.now", "arguments": {}}\n</tool_call>'
    answer = parse(f"<think>\n{call}\n</think>\n\n{call}", HERMES, splits_reasoning=splits_reasoning)
    assert answer.calls == [["stop.now", "{}"]]
    if splits_reasoning:
        assert (answer.reasoning, answer.content) == (call, "")
    else:
        assert (answer.reasoning, answer.content) == ("", f"<think>\n{call}\n</think>")
    assert parse(f"<think>{call}", HERMES).calls == []


@pytest.mark.parametrize("name", SYNTAXES)
def test_without_tools_all_is_content(name):
    text = 'a\n<tool_call>\n{"name": "stop.now", "arguments": {}}\n</tool_call>\n<function=stop.now>\n</function> '
    assert parse(text, SYNTAXES[name], tools=[]) == Answer(content=text, order=["content"])
    text = '{"name": "stop.now", "parameters": {}}'
    assert parse(text, SYNTAXES[name], tools=[]) == Answer(content=text, order=["content"])


def test_space_around_calls_is_dropped_and_text_is_not():
    call = '<tool_call>\n{"name": "stop.now", "arguments": {}}\n</tool_call>'
    answer = parse(f"a \n{call} \n\n {call}\n b \n{call}\n", HERMES)
    assert (answer.content, len(answer.calls)) == ("ab", 3)
    assert answer.order == ["content", "call", "content", "call"]
    assert parse(f" \n{call}", HERMES).order == ["call"]


def test_malformed_calls_before_their_name_are_content():
    for tool_syntax, text in [
        (HERMES, 'a\n<tool_call>\n{"arguments": {"city": "Köln"}}\n</tool_call>\n b'),
        (HERMES, "<tool_call>\nget_weather(city)\n</tool_call>"),
        (HERMES, '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "a b"}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "get_wea'),
        (HERMES, '<tool_call>\n{"arguments": {"city": 1}, "name": "get_weather'),
        (XML, "<tool_call>\n<function=get weather>\n</function>\n</tool_call>"),
        (XML, "<tool_call>\n<function=get_wea"),
        (XML, "<tool_call>\n<parameter=city>\nKöln\n</parameter>\n</tool_call>"),
        (XML, "Write <function=NAME>\n</function> to call."),
        (XML, f"<function={'a' * 65}>"),
        (LLAMA, '{"name": "nobody", "parameters": {}}'),
        (LLAMA, '{"name": "stop.now", "price": 3}'),
        (LLAMA, '{"name": "stop.now"'),
        (LLAMA, '[{"name": "stop.now", "parameters": {}}]'),
        (LLAMA, '<|python_tag|>print("hello")'),
        (LLAMA, 'So: {"name": "stop.now", "parameters": {}}'),
    ]:
        assert parse(text, tool_syntax) == Answer(content=text, order=["content"]), text


def test_calls_cut_off_after_their_name_stay():
    for tool_syntax, text, call, content in [
        (HERMES, '<tool_call>\n{"name": "f", "argum', ["f", ""], ""),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', ["f", '{"a": "b'], ""),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}', ["f", '{"a": 1}'], ""),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\n', ["f", '{"a": 1}'], ""),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1\n</tool_call>\nso', ["f", '{"a": 1\n'], "so"),
        (HERMES, '<tool_call>\n{"name": "f", so}\n</tool_call>', ["f", ""], "so}\n</tool_call>"),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {}} so', ["f", "{}"], "so"),
        (XML, "<tool_call>\n<function=f>\n<parameter=a>\nb\n</par", ["f", '{"a": "b\\n</par'], ""),
        (XML, "<tool_call>\n<function=get_weather>\n<parameter=days>\n1", ["get_weather", '{"days": 1'], ""),
        (XML, "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</func", ["f", '{"a": "b"'], ""),
        (XML, "<tool_call>\n<function=f>\n<parameter=a\n>", ["f", ""], ">"),
        (XML, "<tool_call>\n<function=f>\nso\n</function>", ["f", ""], "so\n</function>"),
        (LLAMA, '{"name": "stop.now", "parameters": {"a', ["stop.now", '{"a'], ""),
    ]:
        answer = parse(text, tool_syntax)
        assert (answer.calls, answer.content) == ([call], content), text


def test_json_calls_that_are_written_otherwise():
    def call(text, tool_syntax=HERMES):
        answer = parse(text, tool_syntax)
        assert answer.content == ""
        (only,) = answer.calls
        return only

    assert call('<tool_call>{"name":"f","arguments":{"a":[1,{}]}}</tool_call>') == ["f", '{"a":[1,{}]}']
    assert call('<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>') == ["f", '{"a": "}"}']
    assert call('<tool_call>{"id": [1, "]"], "name": "f", "x": null, "arguments": {}}</tool_call>') == ["f", "{}"]
    assert call('<tool_call>{"name": "f"}</tool_call>') == ["f", "{}"]
    assert call('<tool_call>{"name": "\\u0066", "arguments": null}</tool_call>') == ["f", "null"]
    assert call('<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>') == ["f", '{"a": "b\nc"}']
    assert call('{"type": "function", "name": "stop.now", "parameters": {}}', LLAMA) == ["stop.now", "{}"]
    assert call('{"parameters": {"a": 1}, "name": "stop.now"} ;\n', LLAMA) == ["stop.now", '{"a": 1}']
    assert call('{"name": "stop.now"}', LLAMA) == ["stop.now", "{}"]


def xml_call(key, value):
    return f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "5", "5"),
        ("city", "\n a\n\n", "\n a\n\n"),
        ("city", "", ""),
        ("city", "null", "null"),
        ("city", "</function>\n</tool_call>", "</function>\n</tool_call>"),
        ("days", "5", 5),
        ("days", " 5\n", 5),
        ("days", "five", "five"),
        ("days", "NaN", "NaN"),
        ("is_metric", "true", True),
        ("is_metric", "False", False),
        ("hours", "[1, 2.5]", [1, 2.5]),
        ("hours", "[1,", "[1,"),
        ("hours", "[" * 100_000, "[" * 100_000),
        ("where", '{\n  "zip": "1"\n}', {"zip": "1"}),
        ("note", "None", None),
        ("note", "5", "5"),
        ("note", "a", "a"),
        ("level", "null", None),
        ("level", "7", 7),
        ("any", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_xml_values_by_their_schema(key, value, expected):
    (call,) = parse(xml_call(key, value), XML).calls
    assert json.loads(call[1]) == {key: expected}


def test_xml_schemas_with_references():
    parameters = {
        "type": "object",
        "$defs": {"Unit": {"enum": ["c", "f"]}, "Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "unit": {"$ref": "#/$defs/Unit"},
            "count": {"allOf": [{"$ref": "#/$defs/Count"}], "description": "how many"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
            "ranged": {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 1}]},
            "old": {"type": "number", "nullable": True},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/$defs/Nothing"},
        },
        "additionalProperties": {"type": "boolean"},
    }
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    for key, value, expected in [
        ("unit", "c", "c"), ("count", "3", 3), ("maybe", "None", None), ("ranged", "4", 4), ("old", "1.5", 1.5),
        ("old", "null", None), ("loop", "1", "1"), ("lost", "1", "1"), ("other", "true", True),
    ]:  # fmt: skip
        (call,) = parse(xml_call(key, value), XML, tools=tools).calls
        assert json.loads(call[1]) == {key: expected}
    tools[0]["function"]["parameters"] = {"$ref": "#/$defs/All", "$defs": {"All": parameters}}
    assert parse(xml_call("old", "1.5"), XML, tools=tools).calls == [["get_weather", '{"old": 1.5}']]
    tools[0]["function"]["parameters"] = {"$ref": "#"}
    assert parse(xml_call("old", "1.5"), XML, tools=tools).calls == [["get_weather", '{"old": "1.5"}']]


def test_xml_calls_that_are_written_otherwise():
    city, days = "<parameter=city>\na\n</parameter>", "<parameter=days>\n2\n</parameter>"
    bare = f"So\n<function=get_weather>\n{city}\n{days}\n</function>\n</tool_call>\n"
    unclosed = f"<tool_call>\n<function=get_weather>\n{city}\n{days}\n</tool_call>"
    inline = f"<tool_call>\n<function=get_weather>\n{city}\n{days}\n</function>\n</tool_call>".replace("\n", "")
    for text in (inline, bare, unclosed):
        answer = parse(text, XML)
        assert arguments_of(answer) == [("get_weather", {"city": "a", "days": 2})], text
        assert answer.content == ("So" if text is bare else "")


LONG_TEXTS = {
    "content": (HERMES, "a < b\n"),
    "space": (HERMES, " "),
    "openings": (HERMES, "<tool_call>"),
    "half openings": (HERMES, "<tool_call"),
    "arguments": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "b\\n{<"),
    "nested arguments": (HERMES, '<tool_call>{"name": "f", "arguments": ', "[{"),
    "arguments before the name": (HERMES, '<tool_call>{"arguments": {"a": "', "b{"),
    "string": (XML, "<tool_call><function=f><parameter=a>", "b\n</para"),
    "object": (XML, "<tool_call><function=get_weather><parameter=where>", '{"a": 1}'),
    "parameters": (XML, "<tool_call><function=f>", "<parameter=a>1</parameter>"),
    "functions": (XML, "<function=f><tool_call><function="),
    "key": (LLAMA, '{"', "a"),
    "reasoning": (LLAMA, "<think>", "\n</thin"),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_time_is_linear(name):
    """Eight times the text may take four times eight times as long, not sixty-four times; the best of three counts."""
    tool_syntax, *begin, repeated = LONG_TEXTS[name]

    def seconds(length):
        text = "".join(begin) + repeated * (length // len(repeated))
        best = float("inf")
        for _ in range(3):
            parser = OutputParser(tool_syntax=tool_syntax, tools=TOOLS, opens_reasoning=False, splits_reasoning=True)
            start = time.process_time()
            for character in text:
                parser.push(character)
            parser.finish()
            best = min(best, time.process_time() - start)
        return best

    assert seconds(32_000) < 4 * 8 * seconds(4_000)


def test_syntaxes_are_found_in_templates():
    qwen3, qwen3_vl, qwen3_5 = ((DATA / f"{name}.jinja").read_text() for name in ("qwen3", "qwen3_vl", "qwen3_5"))
    assert [tool_syntax_of(source) for source in (qwen3, qwen3_vl, qwen3_5)] == [HERMES, HERMES, XML]
    assert [has_reasoning(source) for source in (qwen3, qwen3_vl, qwen3_5)] == [True, False, True]
    llama = (
        """{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- '{"name": ' ~ name ~ ', "parameters": ' }}"""
    )
    assert tool_syntax_of(llama) == LLAMA
    assert tool_syntax_of("{% if message.tool_calls|length != 1 %}" + llama).takes_several is False
    assert tool_syntax_of('<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>') == HERMES
    in_pieces = """{{- '<tool_call>\\n' }}{{- '{' }}{{- '"name": "' ~ call.name ~ '"' }}{{- ', "arguments": ' }}"""
    assert tool_syntax_of(in_pieces) == HERMES
    assert tool_syntax_of("<tool_call>{{ name }}\n<arg_key>city</arg_key>") is None
    assert tool_syntax_of("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    assert not has_reasoning("{{ messages }}")
