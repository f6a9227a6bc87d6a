"""Two images, and how they differ."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from training.tiny_vl.lesson import CANNOT_SEE, Ask, Lesson, any_of, sentence
from training.tiny_vl.shapes import COLOURS, KINDS, PLURALS, Scene, Shape, a_shape, can_be_told, random_scene


def pair_lesson(rng: Random, width: int, height: int, num_asks: int) -> Lesson:
    first = _scene_of_different_shapes(rng, width, height)
    if rng.random() < 0.7:
        second, difference = _changed(rng, first)
    else:
        second, difference = _scene_of_different_shapes(rng, width, height), None
    asks = _compare(rng, first, second)
    if difference is not None:
        question = any_of(
            rng,
            "What is different?",
            "What is the difference between the two pictures?",
            "What changed from the first picture to the second?",
            "How do the pictures differ?",
            "Compare the two pictures.",
        )
        asks = [Ask("two_pictures", question, difference), *asks]
        same = Ask(
            "two_pictures",
            any_of(rng, "Are the two pictures the same?", "Do both pictures show the same?"),
            "Yes." if difference == "Nothing is different." else "No.",
        )
        asks.append(same)
    head, rest = asks[:1], asks[1:]
    rng.shuffle(rest)
    asks = head + rest
    return Lesson((first.draw(), second.draw()), tuple(asks[:num_asks]))


def _scene_of_different_shapes(rng: Random, width: int, height: int) -> Scene:
    scene = random_scene(rng, width, height, rng.randint(1, 5))
    names: set[str] = set()
    shapes = []
    for shape in scene.shapes:
        if shape.name not in names:
            names.add(shape.name)
            shapes.append(shape)
    return replace(scene, shapes=tuple(shapes))


def _changed(rng: Random, scene: Scene) -> tuple[Scene, str]:
    """The scene with one thing changed, and what that is."""
    shapes = list(scene.shapes)
    index = rng.randrange(len(shapes))
    old = shapes[index]
    names = {shape.name for shape in shapes}
    way = rng.random()
    if way < 0.15:
        return scene, "Nothing is different."
    if way < 0.5:
        background = scene.background
        colours = [c for c in COLOURS if can_be_told(c, background)]
        fresh = [c for c in colours if f"{c} {old.kind}" not in names]
        colour = rng.choice(fresh)
        shapes[index] = replace(old, colour=colour)
        return replace(scene, shapes=tuple(shapes)), f"The {old.kind} changed from {old.colour} to {colour}."
    if way < 0.75 and len(shapes) > 1:
        del shapes[index]
        return replace(scene, shapes=tuple(shapes)), f"The {old.name} is gone."
    added = _added(rng, scene, names)
    if added is None:
        return scene, "Nothing is different."
    # Seen in the other order nothing tells the new one from the rest, so it goes in anywhere.
    shapes.insert(rng.randint(0, len(shapes)), added)
    return replace(scene, shapes=tuple(shapes)), f"{sentence(a_shape(added))[:-1]} was added."


def _added(rng: Random, scene: Scene, names: set[str]) -> Shape | None:
    for _ in range(20):
        other = random_scene(rng, scene.width, scene.height, 1)
        if not other.shapes:
            continue
        shape = other.shapes[0]
        clear = all(
            (shape.x - s.x) ** 2 + (shape.y - s.y) ** 2 > (shape.radius + s.radius + 4) ** 2 for s in scene.shapes
        )
        if clear and shape.name not in names and can_be_told(shape.colour, scene.background):
            return shape
    return None


def _compare(rng: Random, first: Scene, second: Scene) -> list[Ask]:
    asks = []
    one, two = len(first.shapes), len(second.shapes)
    question = any_of(rng, "Which picture has more shapes?", "Which of the two pictures has more shapes?")
    more = "The first picture." if one > two else "The second picture." if two > one else "Both have the same number."
    asks.append(Ask("two_pictures", question, more))
    kind = rng.choice(rng.choice((first, second)).shapes).kind if rng.random() < 0.8 else rng.choice(KINDS)
    question = any_of(rng, f"Which picture has a {kind}?", f"In which picture is there a {kind}?")
    asks.append(
        Ask("two_pictures", question, _which(*(any(s.kind == kind for s in x.shapes) for x in (first, second))))
    )
    number, scene = rng.choice((("first", first), ("second", second)))
    question = any_of(
        rng, f"How many shapes are in the {number} picture?", f"How many shapes does the {number} picture have?"
    )
    count = len(scene.shapes)
    asks.append(Ask("two_pictures", question, "There is 1 shape." if count == 1 else f"There are {count} shapes."))
    kinds = [s.kind for s in scene.shapes]
    lone = [s for s in scene.shapes if kinds.count(s.kind) == 1]
    if lone:
        shape = rng.choice(lone)
        word = any_of(rng, "colour", "color")
        asks.append(
            Ask("two_pictures", f"What {word} is the {shape.kind} in the {number} picture?",
                f"The {shape.kind} is {shape.colour}.")
        )  # fmt: skip
    absent = rng.choice([k for k in KINDS if k not in kinds])
    asks.append(Ask("refusal", f"What colour is the {absent} in the {number} picture?", CANNOT_SEE))
    kind = rng.choice(KINDS)
    total = sum(s.kind == kind for x in (first, second) for s in x.shapes)
    told = f"There is 1 {kind}." if total == 1 else f"There are {total or 'no'} {PLURALS[kind]}."
    asks.append(Ask("two_pictures", f"How many {PLURALS[kind]} are there in both pictures together?", told))
    return asks


def _which(in_first: bool, in_second: bool) -> str:
    if in_first and in_second:
        return "Both pictures."
    return "The first picture." if in_first else "The second picture." if in_second else "Neither picture."
