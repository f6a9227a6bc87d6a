"""A Constraint as llguidance reads it, with the reasoning that may come before the answer."""

from __future__ import annotations

import json
from typing import Any

from tilewright.inputs.client_json import parse_json
from tilewright.types import REASONING_TAGS, Constraint, RequestError

MAX_SOURCE_BYTES = 1 << 20
_NAME_BY_KIND = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}

# One space at most between two signs, as json.dumps writes. A weak model falls into line breaks where more are allowed:
# 200 tokens of the embedded model's answer were nothing else where 64 were. A schema may bring options of its own.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20"}

# Reasoning ends at the first closing tag, as text: a vocabulary may have it as one token, as several, or as both.
_OPEN, _CLOSE = REASONING_TAGS
_REASONING = """
start: {start}
reasoning[lazy]: /{open}(?s:.*){close}/
SPACE: /[ \\t\\r\\n]{{1,64}}/
"""


def name_of(constraint: Constraint) -> str:
    """What errors call it."""
    return constraint.subject or _NAME_BY_KIND[constraint.kind]


def grammar_of(constraint: Constraint) -> str:
    """The grammar of a constraint, without reasoning; RequestError for what is obviously none."""
    if constraint.kind not in _NAME_BY_KIND:
        raise RequestError(f"constraint kind is {constraint.kind!r}, expected {', '.join(_NAME_BY_KIND)}")
    name = name_of(constraint)
    try:
        num_bytes = len(constraint.source.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is no Unicode text: {error}") from None
    if num_bytes > MAX_SOURCE_BYTES:
        raise RequestError(f"{name} has {num_bytes} bytes, expected at most {MAX_SOURCE_BYTES}")
    try:
        return json.dumps({"grammars": [_answer(constraint)]})
    except RecursionError:
        raise RequestError(f"{name} cannot be read: it is nested too deeply") from None


def with_reasoning(grammar: str, *, opens_reasoning: bool) -> str:
    """The grammar after reasoning: the rest of it where the prompt ends within it, else any or none."""
    (answer,) = json.loads(grammar)["grammars"]
    reasoning = _REASONING.format(
        start="reasoning SPACE? @answer" if opens_reasoning else "(reasoning SPACE?)? @answer",
        open="" if opens_reasoning else _OPEN,
        close=_CLOSE.replace("/", "\\/"),
    )
    return json.dumps({"grammars": [{"lark_grammar": reasoning}, {**answer, "name": "answer"}]})


def _answer(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "lark":
        return {"lark_grammar": constraint.source}
    if constraint.kind == "regex":
        return {"lark_grammar": f"start: /{_regex(constraint.source)}/"}
    return {"json_schema": _schema(constraint.source)}


def _schema(source: str) -> dict[str, Any]:
    schema = parse_json(source, "the JSON schema")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}  # everything, or nothing
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema is {source.strip()[:80]!r}, expected an object")
    return {"x-guidance": _JSON_OPTIONS, **schema}


def _regex(source: str) -> str:
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise RequestError(f"the regular expression ends with a single backslash: {source[-80:]!r}")
    import llguidance

    # Digits and letters of ASCII, as in JSON Schema's patterns: \d is no Arabic digit.
    return llguidance.regex_to_lark(source, "dw")
