"""What the model is shown and asked: a lesson is something to look at and questions about it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image

CANNOT_SEE = "I can't see that."


@dataclass(frozen=True)
class Ask:
    """A question with the one answer that is right for this wording of it."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Lesson:
    """Images of one size, or the frames of a clip, and what is asked about them."""

    images: tuple[Image.Image, ...]
    asks: tuple[Ask, ...]
    is_clip: bool = False


def listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def any_of(rng: Random, *wordings: str) -> str:
    return wordings[int(rng.random() * len(wordings))]


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def describing(rng: Random) -> str:
    """The question what there is to see."""
    return any_of(
        rng, "Describe the picture.", "Describe this image.", "What do you see?", "What is in the picture?",
        "What is in this image?", "What's in this picture?", "What's in this image?", "What is on it?",
        "Tell me what you see.", "Describe it.", "What is shown here?", "What can you see?",
        "Can you describe the picture?", "Please describe this picture.",
    )  # fmt: skip


def casual(rng: Random, question: str) -> str:
    """The question as some people type it."""
    way = rng.random()
    if way < 0.12:
        question = question[0].lower() + question[1:]
    if way < 0.05 or way > 0.95:
        question = question.rstrip("?.")
    return question.replace("grey", "gray") if way < 0.3 else question
