import datetime
import json

import pytest
from checkpoint_files import DATA
from oracle import require
from PIL import Image

from tilewright.inputs.chat_template import ChatTemplate, read_templates
from tilewright.types import RequestError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather <b>now</b> & später",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "Paris"]}}},
        },
    }
]
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2.5, None, True]}},
}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Hello <|im_end|>"}],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?", "reasoning_content": "a thought"},
        {"role": "user", "content": "What is\n\n 2 + 2?"},
    ],
    "tool calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"degrees": 20}'},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "20 degrees."},
        {"role": "user", "content": "Thanks"},
    ],
}
MEDIA = [
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": "and"},
            {"type": "video"},
            {"type": "image"},
            {"type": "text", "text": "?"},
        ],
    },
    {"role": "assistant", "content": "Nice."},
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "this?"}, {"type": "image"}]},
]


def transformers_render(source, messages, tools=None, **more):
    utils = require("transformers.utils.chat_template_utils")
    more.setdefault("add_generation_prompt", True)
    (text,), _ = utils.render_jinja_template([messages], tools=tools, chat_template=source, **more)
    return text


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", ["qwen3_vl", "qwen3", "qwen3_5"])
def test_text_is_that_of_transformers(template, name, tools):
    source = (DATA / f"{template}.jinja").read_text()
    messages = CONVERSATIONS[name]
    expected = transformers_render(source, messages, tools)
    assert ChatTemplate(source, {}).render(messages, tools=tools) == expected
    assert "Hello" in expected or "brief" in expected or "Weather" in expected


@pytest.mark.parametrize("template", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("more", [{}, {"add_vision_id": True}, {"add_generation_prompt": False}], ids=str)
def test_media_in_order_as_transformers(template, more):
    source = (DATA / f"{template}.jinja").read_text()
    text = ChatTemplate(source, {}).render(MEDIA, **more)
    assert text == transformers_render(source, MEDIA, **more)
    assert text.count("<|image_pad|>") == 3 and text.count("<|video_pad|>") == 2


def test_arguments_as_a_string_of_json():
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    loop = "{% for call in messages[0].tool_calls %}"
    keeps = loop + "{% if call.function.arguments is string %}{{ call.function.arguments }}{% endif %}{% endfor %}"
    assert ChatTemplate(keeps, {}).render(messages) == '{"a":1}'
    parses = loop + "{{ call.function.arguments | tojson }}{% endfor %}"
    assert ChatTemplate(parses, {}).render(messages) == '{"a": 1}'
    assert call["function"]["arguments"] == '{"a":1}', "the caller's messages stay as they are"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "Kö', {"city": "Kö"}),
        ('{"city": "a\\\\', {"city": "a\\"}),
        ('{"city": "a\\', {"city": "a"}),
        ('{"city": "a\\u00', {}),
        ('{"a": 1, "b": [1, {"c": tru', {"a": 1, "b": [1, {}]}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b":', {"a": 1}),
        ('{"a": 1,', {"a": 1}),
        ('{"a, }]": "x, {"', {"a, }]": "x, {"}),
        ("{", {}),
        ("", {}),
        ("get_weather(", {"arguments": "get_weather("}),
        ('{"a": 1}}', {"arguments": '{"a": 1}}'}),
    ],
)
def test_arguments_that_were_cut_off(text, expected):
    """What a call at its limit of tokens leaves goes back into the conversation."""
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]
    assert json.loads(ChatTemplate(source, {}).render(messages)) == expected
    ChatTemplate((DATA / "qwen3_5.jinja").read_text(), {}).render([{"role": "user", "content": "x"}, *messages])


def test_null_content():
    messages = [{"role": "assistant", "content": None}]
    assert ChatTemplate("{{ messages[0].content | length }}", {}).render(messages) == "0"
    assert ChatTemplate("{{ 'none' if messages[0]['content'] is none else 'text' }}", {}).render(messages) == "none"


def test_what_templates_expect_of_jinja():
    def render(source, **more):
        return ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "x"}], **more)

    assert render("{{ bos_token }}{{ eos_token }}|") == "<s>|"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "x!"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{{ thinking }}", thinking=False) == "False"
    assert render("  {% if true %}\nyes\n  {% endif %}\n") == "yes\n"
    assert render("{{ tools is none }}") == render("{{ tools is none }}", tools=[]) == "True"


def test_a_template_that_refuses():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="cannot render the messages"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="expected an object with a role"):
        template.render([{"content": "x"}])
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate("{% if %}", {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_templates_see_no_objects(tmp_path):
    picture = Image.new("RGB", (4, 4))
    source = "{{ messages[0].content[0].image }}{{ messages[0].content[0].image.save('x') }}"
    with pytest.raises(RequestError, match="'str object' has no attribute 'save'"):
        ChatTemplate(source, {}).render([{"role": "user", "content": [{"type": "image", "image": picture}]}])


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([]) == "plain"
    assert template.render([], tools=TOOLS) == "tools"


def test_where_templates_are_found(tmp_path):
    assert read_templates(tmp_path, {}) == {}
    assert read_templates(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    listed = [{"name": "default", "template": "a"}, {"name": "rag", "template": "r"}]
    assert read_templates(tmp_path, {"chat_template": listed}) == {"default": "a", "rag": "r"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "b"}')
    assert read_templates(tmp_path, {"chat_template": "a"}) == {"default": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert read_templates(tmp_path, {"chat_template": "a"}) == {"default": "c", "tool_use": "t"}
