import pytest
from output_answers import TOOLS, tool

from tilewright.server.output import check_tools
from tilewright.types import RequestError


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def test_good_tools_pass():
    check_tools([])
    check_tools(TOOLS)
    check_tools([tool("a-b_c.D9"), tool("x" * 64), function(), function(name="g", description=None, parameters=None)])
    check_tools([function(strict=True, description="what it does", parameters={})])
    check_tools([function(parameters={"type": "object", "properties": {"a": True}, "required": ["a"]})])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "tools is a str, expected a list"),
        ([tool(f"f{i}") for i in range(129)], "tools has 129 entries, expected at most 128"),
        (["f"], r"tools\[0\] is a str"),
        ([tool("f"), {"type": "retrieval"}], r"tools\[1\]\.type is 'retrieval'"),
        ([{"type": "function"}], r"tools\[0\]\.function is None"),
        ([function(name="")], r"tools\[0\]\.function\.name is ''"),
        ([function(name=None)], "name is None"),
        ([function(name="a b")], "name is 'a b', expected 1 to 64"),
        ([function(name="x" * 65)], "name is 'x"),
        ([function(name="f\n")], "name is"),
        ([tool("f"), tool("f")], r"tools\[1\]\.function\.name is 'f', which an earlier tool has"),
        ([function(description=5)], "description is 5"),
        ([function(strict="yes")], "strict is 'yes'"),
        ([function(parameters=[])], r"parameters is \[\]"),
        ([function(parameters={"type": "string"})], "parameters.type is 'string', expected \"object\""),
        ([function(parameters={"properties": ["a"]})], "parameters.properties is"),
        ([function(parameters={"properties": {"a": "string"}})], "properties.a is 'string'"),
        ([function(parameters={"required": "a"})], "required is 'a'"),
        ([function(parameters={"required": [1]})], r"required is \[1\]"),
    ],
)
def test_bad_tools_are_refused(tools, message):
    with pytest.raises(RequestError, match=message):
        check_tools(tools)
