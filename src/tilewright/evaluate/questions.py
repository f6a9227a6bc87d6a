"""Questions about pictures, with their answers: a folder with a file of JSON lines. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright import files
from tilewright.types import RequestError

FILE_NAME = "questions.jsonl"


@dataclass(frozen=True)
class Question:
    """One of the set; `answers` are all that count as right."""

    images: tuple[Path, ...]
    text: str
    answers: tuple[str, ...]
    kind: str = ""

    def is_right(self, answer: str) -> bool:
        return plain(answer) in {plain(one) for one in self.answers}

    @property
    def messages(self) -> list[dict[str, object]]:
        pictures = [{"type": "image", "image": str(path)} for path in self.images]
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": self.text}]}]


@dataclass(frozen=True)
class AnswerScore:
    """How many questions were answered right, and of each kind."""

    num_right: int
    num_questions: int
    by_kind: Mapping[str, tuple[int, int]]  # right ones, all

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
    """The text as answers are compared: lower case, single spaces, no full stop at its end."""
    return " ".join(text.lower().split()).removesuffix(".").rstrip()


def read_questions(folder: Path) -> list[Question]:
    """The questions of a set; RequestError that names the line for one that cannot be asked."""
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
        raise RequestError(f"{place} is no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{place} is no object, expected image, question and answer")
    images = tuple(folder / name for name in _texts(entry, "image", place))
    for image in images:
        if not files.exists(image):
            raise RequestError(f"{place}: {image} is no file")
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
