"""llguidance beside xgrammar, on the vocabulary of Qwen3: python benchmarks/constraints.py [--xgrammar-python PATH]

Builds the tokenizer, compiles schemas, walks valid documents token by token with a mask before each, and says which
schema features are held, ignored or refused. xgrammar is no dependency: PATH is a Python that has it (its wheel with
--no-deps, apache-tvm-ffi, torch, transformers, pydantic). Each library runs in a process of its own.
"""

import argparse
import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import tokenizers

TOKENIZER = Path(__file__).parent.parent / "tests/data/qwen3-tokenizer.json.gz"
VOCABULARY_SIZE, STOP_IDS = 151_936, [151_645, 151_643]  # rows of the model's head, <|im_end|> and <|endoftext|>
LATER_WALKS = 4


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def cases() -> dict[str, tuple[str, str, str]]:
    """Name -> kind, source and a document that fits it."""
    text, whole = {"type": "string"}, {"type": "integer"}
    weather = closed({"city": text, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": whole})
    call = closed({"name": {"const": "get_weather"}, "arguments": weather})
    person = closed({"name": text, "tags": {"type": "array", "items": text}, "friends": {"$ref": "#/$defs/people"}})
    nested = {**person, "$defs": {"people": {"type": "array", "items": person}}}
    friend = {"name": "Ada Lovelace", "tags": ["engine", "notes"], "friends": []}
    words = [f"category {number:03d} of things" for number in range(500)]
    big = closed(
        {
            f"section_{number}": closed(
                {f"field_{index}": [text, whole, {"type": "boolean"}][index % 3] for index in range(20)}
            )
            for number in range(50)
        }
    )
    values = ["The quick brown fox", 12345, True]
    filled = {section: {f"field_{index}": values[index % 3] for index in range(20)} for section in big["properties"]}
    weather_call = {"name": "get_weather", "arguments": {"city": "Zürich", "unit": "celsius", "days": 3}}
    found = {
        "tool call": (call, weather_call),
        "nested, recursive": (nested, {**friend, "friends": [{**friend, "friends": [friend]}, friend]}),
        "enum of 500": (closed({"kind": {"enum": words}}), {"kind": words[321]}),
        "any object": ({"type": "object"}, {"a": [1, 2.5e3, None, {"b": "c"}], "text": "x" * 200}),
        "1,000 fields": (big, filled),
    }
    documents = {
        name: ("json", json.dumps(schema), json.dumps(value, ensure_ascii=False))
        for name, (schema, value) in found.items()
    }
    return documents | {
        "regex": ("regex", r"\d{4}-\d{2}-\d{2} [a-z]{3,20}@[a-z]+\.(com|org)", "2024-02-29 someone@example.org")
    }


# Name -> schema, a document that fits and one that does not.
FEATURES: dict[str, tuple[Any, str, str]] = {
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, '"abc"', '"abd"'),
    "pattern, lookahead": ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, '"abc"', '"xbc"'),
    "format date": ({"type": "string", "format": "date"}, '"2024-02-29"', '"yesterday"'),
    "format email": ({"type": "string", "format": "email"}, '"a@b.org"', '"a"'),
    "format unknown": ({"type": "string", "format": "phone"}, '"1"', '"\\""'),
    "minLength, maxLength": ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"abcd"'),
    "minimum, maximum": ({"type": "integer", "minimum": 3, "maximum": 11}, "10", "12"),
    "number, minimum": ({"type": "number", "minimum": 0.5}, "0.75", "0.25"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "15", "16"),
    "minItems, maxItems": ({"type": "array", "minItems": 1, "maxItems": 2}, "[1]", "[1,2,3]"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1,2]", "[1,1]"),
    "prefixItems": (
        {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "type": "array"},
        '[1,"a"]',
        "[1,2]",
    ),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", '"a"'),
    "oneOf, disjoint": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null", '"a"'),
    "oneOf, overlapping": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1.5", "2"),
    "allOf": ({"allOf": [{"minimum": 2}, {"maximum": 4}], "type": "integer"}, "3", "5"),
    "not": ({"type": "integer", "not": {"const": 3}}, "4", "3"),
    "if, then": ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 9}}, "7", "11"),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, "1", '"a"'),
    "$ref, remote": ({"$ref": "https://example.org/schema.json"}, "1", '"a"'),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a":1}', '{"a":"b"}'),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        '{"x1":1}',
        '{"y":1}',
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1,"b":2}', '{"a":1}'),
    "unknown keyword": ({"type": "integer", "frobnicate": 1}, "1", '"a"'),
}


class Llguidance:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        import llguidance

        self.library = llguidance
        self.tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=VOCABULARY_SIZE, eos_token=STOP_IDS)

    def compile(self, kind: str, source: str) -> Any:
        make = self.library.LLMatcher
        grammar = make.grammar_from_json_schema(source) if kind == "json" else make.grammar_from_regex(source)
        matcher = make(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return matcher

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any, words: np.ndarray) -> None:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id))


class Xgrammar:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        import xgrammar

        self.library = xgrammar
        tokens = [backend.id_to_token(index) or "" for index in range(backend.get_vocab_size())]
        kind = xgrammar.VocabType.BYTE_LEVEL
        info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=VOCABULARY_SIZE, stop_token_ids=STOP_IDS)
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, kind: str, source: str) -> Any:
        compiler = self.compiler
        return (
            compiler.compile_json_schema(source, strict_mode=False)
            if kind == "json"
            else compiler.compile_regex(source)
        )

    def start(self, compiled: Any) -> Any:
        return self.library.GrammarMatcher(compiled)

    def mask(self, matcher: Any, words: np.ndarray) -> None:
        matcher.fill_next_token_bitmask(words[None])

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))


LIBRARIES = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def walk(library: Any, compiled: Any, ids: list[int]) -> tuple[bool, list[float]]:
    """Whether all tokens and then the end were allowed, and the seconds of each mask."""
    matcher, words, seconds = library.start(compiled), np.zeros(-(-VOCABULARY_SIZE // 32), np.int32), []
    for token_id in [*ids, STOP_IDS[0]]:
        began = perf_counter()
        library.mask(matcher, words)
        seconds.append(perf_counter() - began)
        if not words[token_id // 32] >> token_id % 32 & 1 or not library.accept(matcher, token_id):
            return False, seconds
    return True, seconds


def feature(library: Any, encode: Any, schema: Any, good: str, bad: str) -> str:
    try:
        compiled = library.compile("json", json.dumps(schema))
    except Exception:
        return "refused"
    if not walk(library, compiled, encode(good))[0]:
        return "wrong"
    return "ignored" if walk(library, compiled, encode(bad))[0] else "held"


def measure(name: str) -> dict[str, Any]:
    backend = tokenizers.Tokenizer.from_str(gzip.decompress(TOKENIZER.read_bytes()).decode())

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = perf_counter()
    __import__(name)
    imported = perf_counter()
    library = LIBRARIES[name](backend)
    result: dict[str, Any] = {"import, s": imported - began, "tokenizer, s": perf_counter() - imported}
    result["memory, MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    first: list[float] = []
    later: list[float] = []
    for case, (kind, source, document) in cases().items():
        began = perf_counter()
        compiled = library.compile(kind, source)
        result[f"compile {case}, ms"] = 1e3 * (perf_counter() - began)
        ids = encode(document)
        for number in range(1 + LATER_WALKS):
            fits, seconds = walk(library, compiled, ids)
            assert fits, f"{name} refuses the document of {case}"
            (later if number else first).extend(seconds)
    for label, values in (("first", first), ("later", later)):
        for part, value in (("mean", np.mean(values)), ("p99", np.percentile(values, 99)), ("max", max(values))):
            result[f"mask, {label} walk, {part}, us"] = 1e6 * float(value)
    return result | {label: feature(library, encode, *case) for label, case in FEATURES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--xgrammar-python", metavar="PATH")
    parser.add_argument("--only", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only)))
        return
    pythons = {"llguidance": sys.executable} | (
        {"xgrammar": arguments.xgrammar_python} if arguments.xgrammar_python else {}
    )
    columns = {}
    for name, python in pythons.items():
        done = subprocess.run([python, __file__, "--only", name], stdout=subprocess.PIPE, text=True, check=True)
        columns[name] = json.loads(done.stdout.splitlines()[-1])
    print("| |", " | ".join(columns), "|")
    print("| --- |", " | ".join("---" for _ in columns), "|")
    for row in next(iter(columns.values())):
        cells = [column[row] if isinstance(column[row], str) else f"{column[row]:.3g}" for column in columns.values()]
        print(f"| {row} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
