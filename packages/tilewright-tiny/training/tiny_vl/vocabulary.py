"""The words that lessons use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

from training.tiny_vl.clips import clip_lesson
from training.tiny_vl.items import image_lesson
from training.tiny_vl.pairs import pair_lesson
from training.tiny_vl.talk import talk

NUM_SAMPLES = 3000  # lessons whose words are looked at: all the wordings come up many times in as many


def sample_texts() -> Iterator[str]:
    for seed in range(NUM_SAMPLES):
        rng = Random(seed)
        everything = 99
        lessons = [image_lesson(rng, 256, 256, everything)]
        if seed % 3 == 0:
            lessons += [pair_lesson(rng, 64, 64, everything), clip_lesson(rng, 64, 64, 4, everything)]
        for ask in (*(ask for lesson in lessons for ask in lesson.asks), talk(rng)):
            yield ask.question
            yield ask.answer
    yield "<0.5 seconds> You are a helpful assistant."


def words_after_spaces() -> list[str]:
    return sorted({word for text in sample_texts() for word in re.findall(r" ([a-z]+)", text)})
