"""How a model writes tool calls, found from the text of its chat template."""

from __future__ import annotations

import re

from tilewright.server.output.format import ToolFormat
from tilewright.server.output.hermes import HermesFormat
from tilewright.server.output.llama import LlamaFormat
from tilewright.server.output.qwen_xml import QwenXmlFormat

# Line breaks and quotation marks in a template's strings may be escaped.
_LINE_BREAK, _QUOTE = r"(?:\s|\\n)*", r"\\?[\"']"
_HERMES = re.compile(rf"<tool_call>{_LINE_BREAK}\{{\s*{_QUOTE}(?:name|arguments){_QUOTE}")
_LLAMA = re.compile(rf"\{{\s*{_QUOTE}name{_QUOTE}.{{1,40}}{_QUOTE}parameters{_QUOTE}\s*:")
_ONE_CALL_ALONE = re.compile(r"tool_calls\s*\|\s*length\s*[!=]=\s*1")


def tool_format_of(template_source: str) -> ToolFormat | None:
    """How this chat template writes tool calls; None: not at all, or in no way that is known here."""
    if "<function=" in template_source and "<parameter=" in template_source:
        return QwenXmlFormat()
    if _HERMES.search(template_source):
        return HermesFormat()
    if _LLAMA.search(template_source) and "<|start_header_id|>" in template_source:
        return LlamaFormat(takes_several=not _ONE_CALL_ALONE.search(template_source))
    return None
