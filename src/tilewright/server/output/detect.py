"""How a model writes tool calls, found from the text of its chat template."""

from __future__ import annotations

import re

from tilewright.server.output.format import ToolFormat
from tilewright.server.output.hermes import HermesFormat
from tilewright.server.output.llama import LlamaFormat
from tilewright.server.output.qwen_xml import QwenXmlFormat

_QUOTE = r"\\?[\"']"  # may be escaped, in a template's strings
_NAME = re.compile(rf"{_QUOTE}name{_QUOTE}\s*:")
_ARGUMENTS = re.compile(rf"{_QUOTE}arguments{_QUOTE}\s*:")
_LLAMA = re.compile(rf"\{{\s*{_QUOTE}name{_QUOTE}.{{1,40}}{_QUOTE}parameters{_QUOTE}\s*:")
_LLAMA_HEADERS = ("<|start_header_id|>", "<|header_start|>")
_ONE_CALL_ALONE = re.compile(r"tool_calls\s*\|\s*length\s*[!=]=\s*1")


def tool_format_of(template_source: str) -> ToolFormat | None:
    """How this chat template writes tool calls; None: not at all, or in an unknown format."""
    if "<function=" in template_source and "<parameter=" in template_source:
        return QwenXmlFormat()
    if "<tool_call>" in template_source and _NAME.search(template_source) and _ARGUMENTS.search(template_source):
        return HermesFormat()
    if _LLAMA.search(template_source) and any(header in template_source for header in _LLAMA_HEADERS):
        return LlamaFormat(takes_several=not _ONE_CALL_ALONE.search(template_source))
    return None
