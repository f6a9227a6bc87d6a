"""Questions about a scene of shapes: how many, which colour, where, how large, what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from training.tiny_vl.lesson import CANNOT_SEE, Ask, any_of, describing, joined, sentence, with_article
from training.tiny_vl.shapes import COLOURS, KINDS, PLACES, PLURALS, Scene, Shape, a_shape
from training.tiny_vl.talk import TOO_HARD, too_hard_question
from training.tiny_vl.words import THINGS

SIZE_RATIO = 1.3  # of radii: below it, which is larger is no fair question
DISTANCE = 0.1  # of the image's side: closer than that, which is further left is no fair question
MOST_DESCRIBED = 5


def count_shapes(rng: Random, scene: Scene) -> Ask:
    shapes = scene.shapes
    way = rng.random()
    if way < 0.3:
        number, one, many = len(shapes), "shape", "shapes"
    elif way < 0.65:
        kind = rng.choice(shapes).kind if rng.random() < 0.8 else rng.choice(KINDS)
        number, one, many = sum(s.kind == kind for s in shapes), kind, PLURALS[kind]
    elif way < 0.85:
        colour = rng.choice(shapes).colour if rng.random() < 0.8 else rng.choice(tuple(COLOURS))
        number, one, many = sum(s.colour == colour for s in shapes), f"{colour} shape", f"{colour} shapes"
    else:
        shape = rng.choice(shapes)
        number = sum(s.name == shape.name for s in shapes)
        one, many = shape.name, f"{shape.colour} {PLURALS[shape.kind]}"
    if rng.random() < 0.3:
        question = any_of(rng, f"Count the {many}.", f"Number of {many}?", f"How many {many}? Just the number.")
        return Ask("count", question, str(number))
    question = any_of(
        rng,
        f"How many {many} are there?",
        f"How many {many} do you see?",
        f"How many {many} are in the picture?",
        f"How many {many} can you see in this image?",
        f"How many {many}?",
        f"How many {many} can you count?",
    )
    told = f"There is 1 {one}." if number == 1 else f"There are {number or 'no'} {many}."
    return Ask("count", question, told)


def colour_of(rng: Random, scene: Scene) -> Ask | None:
    word = any_of(rng, "colour", "colour", "color")
    if rng.random() < 0.2:
        question = any_of(
            rng,
            f"What {word} is the background?",
            f"Which {word} is the background?",
            f"Background {word}?",
            f"What is the background {word}?",
            f"What is the {word} of the background?",
        )
        return Ask("colour", question, f"The background is {scene.background}.")
    shape = _only_one(rng, scene, lambda s: s.kind)
    if shape is None:
        return None
    if rng.random() < 0.3:
        question = any_of(rng, f"Name the {word} of the {shape.kind}.", f"The {word} of the {shape.kind}, in one word?")
        return Ask("colour", question, shape.colour)
    question = any_of(
        rng,
        f"What {word} is the {shape.kind}?",
        f"Which {word} is the {shape.kind}?",
        f"What is the {word} of the {shape.kind}?",
        f"Which {word} does the {shape.kind} have?",
        f"What's the {word} of the {shape.kind}?",
    )
    return Ask("colour", question, f"The {shape.kind} is {shape.colour}.")


def kind_of(rng: Random, scene: Scene) -> Ask | None:
    shape = _only_one(rng, scene, lambda s: s.colour)
    if shape is None:
        return None
    question = any_of(
        rng,
        f"What is the {shape.colour} shape?",
        f"Which shape is {shape.colour}?",
        f"What shape is {shape.colour}?",
        f"What is {shape.colour}?",
    )
    return Ask("colour", question, f"The {shape.colour} shape is a {shape.kind}.")


def place_of(rng: Random, scene: Scene) -> Ask | None:
    shape = _only_one(rng, scene, lambda s: s.name)
    if shape is None:
        return None
    place = shape.place(scene.width, scene.height)
    if place is None:
        return None
    alone = sum(s.kind == shape.kind for s in scene.shapes) == 1
    name = shape.kind if alone and rng.random() < 0.5 else shape.name
    question = any_of(
        rng,
        f"Where is the {name}?",
        f"Where do you see the {name}?",
        f"Where in the picture is the {name}?",
        f"In which part of the image is the {name}?",
    )
    return Ask("position", question, f"The {name} is {PLACES[place[0]][place[1]]}.")


def what_is_at(rng: Random, scene: Scene) -> Ask | None:
    if None in scene.places:
        return None
    there = Counter(scene.places)
    wanted = rng.choice(scene.shapes) if rng.random() < 0.85 else None
    place = wanted.place(scene.width, scene.height) if wanted else (rng.randrange(3), rng.randrange(3))
    if place is None or there[place] > 1:
        return None
    where = PLACES[place[0]][place[1]]
    question = any_of(
        rng, f"What is {where}?", f"Which shape is {where}?", f"What do you see {where}?", f"What is there {where}?"
    )
    found = next((shape for shape, spot in zip(scene.shapes, scene.places, strict=True) if spot == place), None)
    return Ask("position", question, f"{sentence(a_shape(found))}" if found else "Nothing.")


def beside(rng: Random, scene: Scene) -> Ask | None:
    """Is one left of, right of, above or below another?"""
    pair = _two_named(rng, scene)
    if pair is None:
        return None
    one, other = pair
    across, down = (one.x - other.x) / scene.width, (one.y - other.y) / scene.height
    if rng.random() < 0.5:
        apart, words, is_true = across, any_of(rng, "left of", "right of"), across < 0
        is_true = is_true if words == "left of" else not is_true
    else:
        apart, words, is_true = down, any_of(rng, "above", "below"), down < 0
        is_true = is_true if words == "above" else not is_true
    if abs(apart) < DISTANCE:
        return None
    names = [(s.kind if _is_only_kind(scene, s) and rng.random() < 0.4 else s.name) for s in pair]
    question = any_of(
        rng,
        f"Is the {names[0]} {words} the {names[1]}?",
        f"Does the {names[0]} lie {words} the {names[1]}?",
    )
    return Ask("position", question, "Yes." if is_true else "No.")


def outermost(rng: Random, scene: Scene) -> Ask | None:
    if len(scene.shapes) < 2:
        return None
    words, key = rng.choice(
        (
            ("furthest to the left", lambda s: s.x / scene.width),
            ("furthest to the right", lambda s: -s.x / scene.width),
            ("highest up", lambda s: s.y / scene.height),
            ("lowest down", lambda s: -s.y / scene.height),
        )
    )
    first, second = sorted(scene.shapes, key=key)[:2]
    if key(second) - key(first) < DISTANCE:
        return None
    question = any_of(rng, f"Which shape is {words}?", f"What is {words}?")
    return Ask("position", question, f"The {first.name}.")


def larger(rng: Random, scene: Scene) -> Ask | None:
    pair = _two_named(rng, scene)
    if pair is None:
        return None
    one, other = pair
    if max(one.radius, other.radius) < SIZE_RATIO * min(one.radius, other.radius):
        return None
    word, wants_large = rng.choice((("larger", True), ("bigger", True), ("smaller", False)))
    question = any_of(
        rng,
        f"Which is {word}, the {one.name} or the {other.name}?",
        f"What is {word}: the {one.name} or the {other.name}?",
    )
    winner = one if (one.radius > other.radius) == wants_large else other
    return Ask("size", question, f"The {winner.name} is {word}.")


def largest(rng: Random, scene: Scene) -> Ask | None:
    if len(scene.shapes) < 2:
        return None
    word, sign = rng.choice((("largest", -1), ("biggest", -1), ("smallest", 1)))
    first, second = sorted(scene.shapes, key=lambda s: sign * s.radius)[:2]
    if max(first.radius, second.radius) < SIZE_RATIO * min(first.radius, second.radius):
        return None
    question = any_of(
        rng, f"Which shape is the {word}?", f"What is the {word} shape?", f"Which is the {word} of the shapes?"
    )
    return Ask("size", question, f"The {first.name} is the {word}.")


def is_larger(rng: Random, scene: Scene) -> Ask | None:
    pair = _two_named(rng, scene)
    if pair is None:
        return None
    one, other = pair
    if max(one.radius, other.radius) < SIZE_RATIO * min(one.radius, other.radius):
        return None
    word, wants_large = rng.choice((("larger", True), ("bigger", True), ("smaller", False)))
    names = [(s.kind if _is_only_kind(scene, s) and rng.random() < 0.4 else s.name) for s in pair]
    is_true = (one.radius > other.radius) == wants_large
    return Ask("size", f"Is the {names[0]} {word} than the {names[1]}?", "Yes." if is_true else "No.")


def all_colours(rng: Random, scene: Scene) -> Ask:
    """Of the shapes, in the palette's order."""
    word = any_of(rng, "colour", "color")
    found = [colour for colour in COLOURS if any(s.colour == colour for s in scene.shapes)]
    if rng.random() < 0.4:
        question = any_of(rng, f"How many {word}s do the shapes have?", f"How many different {word}s are the shapes?")
        return Ask("count", question, str(len(found)))
    question = any_of(
        rng, f"Which {word}s do the shapes have?", f"What {word}s are the shapes?", f"Name all the {word}s.",
        f"Which {word}s do you see?", f"List the {word}s of the shapes.",
    )  # fmt: skip
    return Ask("colour", question, sentence(joined(found)))


def all_kinds(rng: Random, scene: Scene) -> Ask:
    found = [kind for kind in KINDS if any(s.kind == kind for s in scene.shapes)]
    question = any_of(
        rng, "Which shapes are there?", "What kinds of shapes are there?", "Which kinds of shapes do you see?",
        "What shapes do you see?", "Name the shapes.",
    )  # fmt: skip
    names = [PLURALS[kind] if sum(s.kind == kind for s in scene.shapes) > 1 else with_article(kind) for kind in found]
    return Ask("colour", question, sentence(joined(names)))


def is_there(rng: Random, scene: Scene) -> Ask:
    if rng.random() < 0.15:
        thing = with_article(rng.choice(THINGS))
        question = any_of(
            rng, f"Is there {thing}?", f"Do you see {thing}?", f"Can you see {thing}?", f"Is this {thing}?"
        )
        return Ask("colour", question, "No.")
    shape = rng.choice(scene.shapes)
    colour, kind = shape.colour, shape.kind
    if rng.random() < 0.6:  # one word changed, so that both must be looked at
        if rng.random() < 0.5:
            colour = rng.choice(tuple(COLOURS))
        else:
            kind = rng.choice(KINDS)
    if rng.random() < 0.4:
        name, found = kind, any(s.kind == kind for s in scene.shapes)
    else:
        name, found = f"{colour} {kind}", any(s.name == f"{colour} {kind}" for s in scene.shapes)
    article = "an" if name[0] in "aeiou" else "a"
    question = any_of(
        rng, f"Is there {article} {name}?", f"Do you see {article} {name}?", f"Can you see {article} {name}?"
    )
    return Ask("colour", question, "Yes." if found else "No.")


def describe(rng: Random, scene: Scene) -> Ask | None:
    """All shapes with their places, by rows from the top left."""
    if None in scene.places or len(set(scene.places)) < len(scene.shapes) or len(scene.shapes) > MOST_DESCRIBED:
        return None
    placed = sorted(zip(scene.places, scene.shapes, strict=True), key=lambda pair: pair[0] or (0, 0))
    parts = [f"{a_shape(shape)} {PLACES[place[0]][place[1]]}" for place, shape in placed if place]
    return Ask("describe", describing(rng), sentence(joined(parts)))


def refuse(rng: Random, scene: Scene) -> Ask:
    """A question about something that is not there."""
    word = any_of(rng, "colour", "color")
    kinds, names = {s.kind for s in scene.shapes}, {s.name for s in scene.shapes}
    way = rng.random()
    if way < 0.4:
        kind = rng.choice([kind for kind in KINDS if kind not in kinds] or ["bird"])
        question = any_of(
            rng,
            f"What {word} is the {kind}?",
            f"Which {word} is the {kind}?",
            f"What is the {word} of the {kind}?",
            f"Where is the {kind}?",
            f"Where do you see the {kind}?",
        )
    elif way < 0.65:
        name = f"{rng.choice(tuple(COLOURS))} {rng.choice(sorted(kinds))}"
        if name in names:
            name = f"{rng.choice(tuple(COLOURS))} arrow"
        question = any_of(rng, f"Where is the {name}?", f"Where in the picture is the {name}?")
    elif way < 0.85:
        thing = rng.choice(THINGS)
        question = any_of(
            rng,
            f"What {word} is the {thing}?",
            f"Where is the {thing}?",
            f"What is the {thing} doing?",
            f"Which {word} does the {thing} have?",
        )
    else:
        question = any_of(
            rng,
            "What does it say?",
            "Read the text.",
            "What is written here?",
            "Which bar is the tallest?",
            "What number is shown?",
            f"What is the value of {rng.choice('ABCDEF')}?",
        )
    return Ask("refusal", question, CANNOT_SEE)


def too_hard(rng: Random, scene: Scene) -> Ask | None:
    return Ask("refusal", too_hard_question(rng), TOO_HARD) if rng.random() < 0.3 else None


def ask_about(rng: Random, scene: Scene, count: int) -> list[Ask]:
    makers: tuple[Callable[[Random, Scene], Ask | None], ...] = (
        count_shapes, count_shapes, colour_of, colour_of, kind_of, place_of, place_of, what_is_at, beside, outermost,
        larger, is_larger, largest, is_there, all_colours, all_kinds, describe, describe, refuse, refuse, too_hard,
    )  # fmt: skip
    asks = []
    for maker in rng.sample(makers, len(makers)):
        ask = maker(rng, scene)
        if ask is not None:
            asks.append(ask)
        if len(asks) == count:
            break
    return asks


def _only_one(rng: Random, scene: Scene, key: Callable[[Shape], str]) -> Shape | None:
    """A shape that the key names alone."""
    numbers = Counter(map(key, scene.shapes))
    known = [shape for shape in scene.shapes if numbers[key(shape)] == 1]
    return rng.choice(known) if known else None


def _is_only_kind(scene: Scene, shape: Shape) -> bool:
    return sum(other.kind == shape.kind for other in scene.shapes) == 1


def _two_named(rng: Random, scene: Scene) -> tuple[Shape, Shape] | None:
    numbers = Counter(shape.name for shape in scene.shapes)
    known = [shape for shape in scene.shapes if numbers[shape.name] == 1]
    if len(known) < 2:
        return None
    one, other = rng.sample(known, 2)
    return one, other
