"""Compiles the constraint of a request to a grammar, and caches it for the next request.

The grammar is in the form llguidance reads, with the reasoning that may come before the answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from tilewright.engine.constraint.grammar import COMPILE_STACK_BYTES, GrammarError, build, on_deep_stack
from tilewright.engine.constraint.matcher import Matcher
from tilewright.inputs.client_json import parse_json
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import REASONING_TAGS, Constraint, RequestError

if TYPE_CHECKING:
    import llguidance

    from tilewright.engine.constraint.sandbox import CompileSandbox
    from tilewright.engine.constraint.vocabulary import Vocabulary

MAX_SOURCE_BYTES = 1 << 20
_NAME_BY_KIND = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}

# One space at most between two signs, as json.dumps writes. Where more are allowed, a weak model falls into line
# breaks: in one answer of the embedded model they were 200 tokens, the answer itself 64. A schema may override this.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20"}

# Reasoning ends at the first closing tag, as text: a vocabulary may have it as one token, as several, or as both.
_OPEN, _CLOSE = REASONING_TAGS
_REASONING = """
start: {start}
reasoning[lazy]: /{open}(?s:.*){close}/
SPACE: /[ \\t\\r\\n]{{1,64}}/
"""


def name_of(constraint: Constraint) -> str:
    """Return the constraint's name in error messages."""
    return constraint.subject or _NAME_BY_KIND[constraint.kind]


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint, without reasoning; RequestError for obvious errors."""
    if constraint.kind not in _NAME_BY_KIND:
        raise RequestError(f"constraint kind is {constraint.kind!r}, expected {', '.join(_NAME_BY_KIND)}")
    name = name_of(constraint)
    try:
        num_bytes = len(constraint.source.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not Unicode text: {error}") from None
    if num_bytes > MAX_SOURCE_BYTES:
        raise RequestError(f"{name} has {num_bytes} bytes, expected at most {MAX_SOURCE_BYTES}")
    try:
        return json.dumps({"grammars": [_answer(constraint)]})
    except RecursionError:
        raise RequestError(f"{name} cannot be read: it is nested too deeply") from None


def with_reasoning(grammar: str, *, opens_reasoning: bool) -> str:
    """Return the grammar preceded by reasoning: the rest of it if the prompt ends within it, else optional."""
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
        schema = {} if schema else {"enum": []}  # true allows everything, false nothing
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema is {source.strip()[:80]!r}, expected an object")
    return {"x-guidance": _JSON_OPTIONS, **schema}


def _regex(source: str) -> str:
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise RequestError(f"the regular expression ends with a single backslash: {source[-80:]!r}")
    import llguidance

    # Only ASCII digits and letters, as in JSON Schema's patterns: \d matches no Arabic digit.
    return llguidance.regex_to_lark(source, "dw")


MAX_GRAMMARS = 32
MAX_REFUSALS = 1024
REFUSAL_S = 60.0  # the same constraint is refused at once for this long; later the machine may be less busy
# Error of a schema within a grammar, as for tools: its position in the grammar means nothing to its author.
_SCHEMA_ERROR = re.compile(r"failed to compile JSON schema: (.*)")


class Grammar:
    """A compiled constraint. Its matchers share the states of the lexer."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, constraint: Constraint) -> None:
        self.is_broken = False  # a matcher has hit a limit, perhaps of the shared states
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._constraint = constraint

    def start(self) -> Matcher:
        """Return a matcher for one answer, at its start."""
        names_token_ids = self._constraint.kind == "lark"
        return Matcher(self._matcher.deep_copy(), self._vocabulary, self._break, names_token_ids=names_token_ids)

    def _break(self, error: str) -> RequestError:
        self.is_broken = True
        message = f"{name_of(self._constraint)} cannot be followed any further: {error}"
        return RequestError(message, param="constraint")


class ConstraintCompiler:
    """Compiles and caches constraints. Thread-safe. The first one also builds the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._vocabulary: tuple[Vocabulary, CompileSandbox] | None = None
        self._vocabulary_lock = threading.Lock()
        self._grammars: OrderedDict[tuple[Constraint, bool], Grammar] = OrderedDict()
        # Time and reason by digest: a source may have a megabyte.
        self._refusals: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._grammars_lock = threading.Lock()

    def knows(self, constraint: Constraint) -> bool:
        """Return whether `compile` answers at once."""
        with self._grammars_lock:
            known = [self._grammars.get((constraint, opens)) for opens in {False, constraint.allows_reasoning}]
            is_compiled = all(grammar is not None and not grammar.is_broken for grammar in known)
            return is_compiled or self._refusal(constraint) is not None

    def compile(self, constraint: Constraint, *, opens_reasoning: bool = False) -> Grammar:
        """Return the grammar of a constraint; RequestError with the reason if it cannot be compiled."""
        key = constraint, opens_reasoning and constraint.allows_reasoning
        with self._grammars_lock:
            known = self._grammars.get(key)
            if known is not None and not known.is_broken:
                self._grammars.move_to_end(key)
                return known
            refusal = self._refusal(constraint)
        if refusal is not None:
            raise RequestError(refusal, param="constraint")
        try:
            grammar = self._compile(constraint, opens_reasoning)
        except RequestError as error:
            error.param = "constraint"
            with self._grammars_lock:
                self._refusals[_digest(constraint)] = time.monotonic(), str(error)
                if len(self._refusals) > MAX_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
        with self._grammars_lock:
            self._grammars[key] = grammar
            self._grammars.move_to_end(key)
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _refusal(self, constraint: Constraint) -> str | None:
        """Return why the constraint was refused within the last REFUSAL_S seconds, or None."""
        refused_s, reason = self._refusals.get(_digest(constraint), (0.0, None))
        return reason if time.monotonic() - refused_s < REFUSAL_S else None

    def _compile(self, constraint: Constraint, opens_reasoning: bool) -> Grammar:
        source = grammar_of(constraint)
        vocabulary, trial = self._made_vocabulary()
        try:
            trial.run(source)
            matcher = on_deep_stack(lambda: build(vocabulary.tokenizer, source), COMPILE_STACK_BYTES)
            if constraint.allows_reasoning:
                # The answer alone was compiled too: an error in it would only show after the reasoning.
                longer = with_reasoning(source, opens_reasoning=opens_reasoning)
                matcher = on_deep_stack(lambda: build(vocabulary.tokenizer, longer), COMPILE_STACK_BYTES)
        except GrammarError as error:
            within = _SCHEMA_ERROR.search(str(error)) if constraint.kind == "lark" else None
            raise RequestError(f"{name_of(constraint)} cannot be used: {within[1] if within else error}") from None
        return Grammar(matcher, vocabulary, constraint)

    def _made_vocabulary(self) -> tuple[Vocabulary, CompileSandbox]:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                # These load llguidance, which an engine without constraints does not need.
                from tilewright.engine.constraint.sandbox import CompileSandbox
                from tilewright.engine.constraint.vocabulary import Vocabulary

                made = Vocabulary(self._tokenizer, self._vocabulary_size)
                self._vocabulary = made, CompileSandbox(made.num_tokens, made.special_tokens, made.stop_token_ids)
            return self._vocabulary


def _digest(constraint: Constraint) -> bytes:
    fields = (constraint.kind, constraint.source, constraint.allows_reasoning, constraint.subject)
    return hashlib.blake2b(repr(fields).encode("utf-8", "surrogatepass"), digest_size=16).digest()
