"""Answers as the tests of the output look at them: whole, however they came."""

from dataclasses import dataclass, field

from tilewright.server.output import OutputParser
from tilewright.server.output.json_syntax import HermesSyntax, LlamaSyntax
from tilewright.server.output.qwen_xml import QwenXmlSyntax

HERMES, LLAMA, XML = HermesSyntax(), LlamaSyntax(), QwenXmlSyntax()
SYNTAXES = {"hermes": HERMES, "llama": LLAMA, "xml": XML}


def tool(name, properties=None, required=(), **rest):
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **rest}}


WEATHER = tool(
    "get_weather",
    {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "is_metric": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "number"}},
        "where": {"type": "object", "properties": {"zip": {"type": "string"}}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "any": {},
    },
    ["city"],
)
STOP = tool("stop.now")
TOOLS = [WEATHER, STOP]


@dataclass
class Answer:
    """An answer put together from its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)  # [name, text of the arguments]
    order: list = field(default_factory=list)  # of what came, without repeats


def assemble(pieces):
    """The answer; holds every piece to what clients rely on."""
    answer = Answer()
    ids = set()
    for piece in pieces:
        call = piece.tool_call
        assert [bool(piece.content), bool(piece.reasoning), call is not None].count(True) == 1
        if call is None:
            kind = "content" if piece.content else "reasoning"
            setattr(answer, kind, getattr(answer, kind) + piece.content + piece.reasoning)
        elif call.name is not None:
            kind = "call"
            assert call.index == len(answer.calls)
            assert call.arguments == ""
            assert len(call.id) == len("call_") + 24
            assert call.id.startswith("call_")
            assert call.id not in ids
            ids.add(call.id)
            answer.calls.append([call.name, ""])
        else:
            kind = "call"
            assert call.id is None
            assert call.arguments
            assert call.index == len(answer.calls) - 1
            answer.calls[-1][1] += call.arguments
        if answer.order[-1:] != [kind]:
            answer.order.append(kind)
    return answer


def parse(texts, tool_syntax, tools=TOOLS, opens_reasoning=False, splits_reasoning=True):
    """The answer whose text comes in these pieces."""
    parser = OutputParser(
        tool_syntax=tool_syntax, tools=tools, opens_reasoning=opens_reasoning, splits_reasoning=splits_reasoning
    )
    pieces = [piece for text in ([texts] if isinstance(texts, str) else texts) for piece in parser.push(text)]
    pieces += parser.finish()
    answer = assemble(pieces)
    assert parser.has_tool_calls == bool(answer.calls)
    assert parser.finish() == []
    return answer
