"""Lessons in fixed shares, and the validation and test sets, whose items are made from seeds of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from PIL import Image

from training.tiny_vl.ask_shapes import ask_about
from training.tiny_vl.charts import chart_lesson
from training.tiny_vl.clips import clip_lesson
from training.tiny_vl.lesson import Ask, Lesson, casual
from training.tiny_vl.pairs import pair_lesson
from training.tiny_vl.photos import photo_lesson
from training.tiny_vl.shapes import random_scene
from training.tiny_vl.talk import talk
from training.tiny_vl.texts import text_lesson

SIDE = 256
CLIP_SIDE, CLIP_FPS = 128, 2.0
# Training seeds are numbers, these are not, so the three series of random numbers are different.
VALIDATION_SEED = "held out"  # the one by whose scores the embedded weights were chosen
TEST_SEED = "test"

# The kinds of question, each with its share of 1,000 items of a set.
SHARES = {
    "count": 110,
    "colour": 110,
    "position": 110,
    "describe": 90,
    "size": 60,
    "read": 180,
    "find": 20,
    "chart": 90,
    "two_pictures": 70,
    "clip": 70,
    "refusal": 60,
    "text": 30,
}


@dataclass(frozen=True)
class Item:
    """One question of the validation or the test set."""

    kind: str
    images: tuple[Image.Image, ...]
    clip: tuple[Image.Image, ...]
    fps: float
    question: str
    answer: str


def shape_lesson(rng: Random, width: int, height: int, num_asks: int) -> Lesson:
    scene = random_scene(rng, width, height)
    return Lesson((scene.draw(),), tuple(ask_about(rng, scene, num_asks)))


def image_lesson(rng: Random, width: int, height: int, num_asks: int, photos: Path | None = None) -> Lesson:
    """One image: writing and charts most often, since reading and finding are what takes longest to learn."""
    way = rng.random()
    if way < 0.03:
        return photo_lesson(rng, width, height, num_asks, photos)
    make: Callable[[Random, int, int, int], Lesson]
    make = text_lesson if way < 0.4 else shape_lesson if way < 0.65 else chart_lesson
    return make(rng, width, height, num_asks)


def validation(count: int) -> Iterator[Item]:
    """The items that training chooses weights by, which makes their scores too good to report as the model's."""
    return _items(VALIDATION_SEED, count)


def test(count: int) -> Iterator[Item]:
    """The items that nothing of training looks at: what the model is judged by."""
    return _items(TEST_SEED, count)


SETS = {"validation": validation, "test": test}


def _items(seed: str, count: int) -> Iterator[Item]:
    """The first `count` of an endless series in which kinds come in their shares."""
    order = [kind for kind, share in SHARES.items() for _ in range(share)]
    Random(seed).shuffle(order)
    for index in range(count):
        yield _item(order[index % len(order)], Random(f"{seed} {index}"))


def _item(kind: str, rng: Random) -> Item:
    if kind == "text":
        ask = talk(rng)
        return Item(kind, (), (), 0.0, ask.question, ask.answer)
    while True:
        lesson = _lesson_for(kind, rng)
        fitting = [ask for ask in lesson.asks if ask.kind == kind]
        if fitting:
            ask = rng.choice(fitting)
            return _as_item(replace(ask, question=casual(rng, ask.question)), lesson)


def _lesson_for(kind: str, rng: Random) -> Lesson:
    everything = 99
    if kind in ("read", "find"):
        return text_lesson(rng, SIDE, SIDE, everything)
    if kind == "chart":
        return chart_lesson(rng, SIDE, SIDE, everything)
    if kind == "two_pictures":
        return pair_lesson(rng, SIDE, SIDE, everything)
    if kind == "clip":
        return clip_lesson(rng, CLIP_SIDE, CLIP_SIDE, rng.choice((4, 6, 8)), everything)
    if kind == "refusal" and rng.random() < 0.5:
        return _lesson_for(rng.choice(("read", "chart", "two_pictures", "clip", "photo")), rng)
    if kind == "photo":
        return photo_lesson(rng, SIDE, SIDE, everything)
    return shape_lesson(rng, SIDE, SIDE, everything)


def _as_item(ask: Ask, lesson: Lesson) -> Item:
    images, clip = ((), lesson.images) if lesson.is_clip else (lesson.images, ())
    return Item(ask.kind, images, clip, CLIP_FPS if clip else 0.0, ask.question, ask.answer)
