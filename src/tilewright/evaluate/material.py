"""The material of an evaluation: variants of a model, windows of a text, questions about images. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.host import files
from tilewright.types import RequestError

STORED = "stored"  # as in the checkpoint, quantised or not
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class EvalVariant:
    """A model as it is evaluated: the format of its weights, and that of its keys and values."""

    name: str  # "int8", "bf16/fp8": `quantize`'s names and a few more, a slash, and `kv_cache_dtype`'s

    @property
    def engine_options(self) -> dict[str, Any]:
        """The Engine's options for this variant."""
        weights, _, kv = self.name.partition("/")
        options: dict[str, Any] = {}
        if weights in _DTYPES:
            options = {"quantize": "none", "dtype": _DTYPES[weights]}
        elif weights != STORED:
            options = {"quantize": weights}
        return options | ({"kv_cache_dtype": kv} if kv else {})


def parse_variants(text: str) -> list[EvalVariant]:
    """Return the variants of a list such as "none,int8,int4/int8"."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        weights, slash, kv = name.partition("/")
        if not weights or (slash and not kv):
            raise RequestError(f"--quantize has {name!r}, expected formats separated by commas, such as none,int8,int4")
    if len(set(names)) < len(names):
        raise RequestError(f"--quantize is {text!r}, expected every format once")
    return [EvalVariant(name) for name in names]


@dataclass(frozen=True)
class Window:
    """Tokens that the model reads; those from `first_scored` on are scored, those before are context."""

    token_ids: tuple[int, ...]
    first_scored: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored


def split(token_ids: Sequence[int], length: int, stride: int, beginning: Sequence[int] = ()) -> list[Window]:
    """Return windows of at most `length` tokens, `stride` apart: every token but the first is scored once.

    `beginning` are the tokens that the tokenizer puts before a text; every window includes them in its length.
    """
    size = length - len(beginning)
    if not 1 <= stride < size:
        raise RequestError(f"--stride is {stride}, expected 1 to {size - 1}: less than the tokens of a window")
    if len(token_ids) < 2:
        raise RequestError(f"the text has {len(token_ids)} tokens, expected 2 or more")
    windows = []
    scored = 0 if beginning else 1  # without a beginning, nothing predicts the first token
    start = 0
    while scored < len(token_ids):
        stop = min(start + size, len(token_ids))
        part = (*beginning, *token_ids[start:stop])
        windows.append(Window(part, len(beginning) + scored - start))
        scored = stop
        start += stride
    return windows


FILE_NAME = "questions.jsonl"


@dataclass(frozen=True)
class Question:
    """A question of the set; `answers` are all right answers."""

    images: tuple[Path, ...]
    text: str
    answers: tuple[str, ...]
    kind: str = ""

    def is_right(self, answer: str) -> bool:
        return plain(answer) in {plain(one) for one in self.answers}

    @property
    def messages(self) -> list[dict[str, object]]:
        images = [{"type": "image", "image": str(path)} for path in self.images]
        return [{"role": "user", "content": [*images, {"type": "text", "text": self.text}]}]


@dataclass(frozen=True)
class AnswerScore:
    """The numbers of questions and of right answers, in total and by kind."""

    num_right: int
    num_questions: int
    by_kind: Mapping[str, tuple[int, int]]  # (right, all)

    @classmethod
    def of(cls, questions: Sequence[Question], is_right: Sequence[bool]) -> AnswerScore:
        right = Counter(question.kind for question, good in zip(questions, is_right, strict=True) if good)
        count = Counter(question.kind for question in questions)
        by_kind = {kind: (right[kind], count[kind]) for kind in count} if set(count) != {""} else {}
        return cls(sum(is_right), len(questions), by_kind)

    @property
    def share(self) -> float:
        return self.num_right / self.num_questions


def plain(text: str) -> str:
    """Return the text in the form for comparison: lower case, single spaces, no full stop at the end."""
    return " ".join(text.lower().split()).removesuffix(".").rstrip()


def read_questions(folder: Path) -> list[Question]:
    """Return the questions of a set; raise RequestError, with the line number, for an invalid one."""
    path = folder / FILE_NAME
    try:
        lines = files.read_bytes(path, files.MAX_TEXT_BYTES).decode().splitlines()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8") from error
    questions = [_question(folder, line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise RequestError(f"{path} has no questions")
    return questions


def _question(folder: Path, line: str, place: str) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{place} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{place} is not an object, expected image, question and answer")
    images = tuple(folder / name for name in _texts(entry, "image", place))
    for image in images:
        if not files.exists(image):
            raise RequestError(f"{place}: {image} does not exist")
    (text,) = _texts(entry, "question", place, at_most=1)
    kind = entry.get("kind", "")
    if not isinstance(kind, str):
        raise RequestError(f"{place}: kind is {kind!r}, expected text")
    return Question(images, text, _texts(entry, "answer", place), kind)


def _texts(entry: Mapping[str, object], key: str, place: str, at_most: int | None = None) -> tuple[str, ...]:
    value = entry.get(key)
    texts = tuple(value) if isinstance(value, list) else (value,)
    if not texts or not all(isinstance(text, str) and text for text in texts) or len(texts) > (at_most or len(texts)):
        what = "text" if at_most == 1 else "text, or a list of them"
        raise RequestError(f"{place}: {key} is {value!r}, expected {what}")
    return tuple(str(text) for text in texts)
